-- Forsake jobs whose clients have all been silent for longer than their leases, and call off those
-- that were forsaken for long: at most args.most of each. Whether one is, is seen here and nowhere
-- else: a client may come at any moment before. Returns how many of each there were.
local function due(name) return redis.call('ZRANGEBYSCORE', name, 0, stamp(NOW), 'LIMIT', 0, args.most) end
local silent, forsaken = due('tandem:attended'), due('tandem:abandoned')
for _, id in ipairs(silent) do forsake(id, args.grace) end
for _, id in ipairs(forsaken) do call_off(id) end
return {#silent, #forsaken}
