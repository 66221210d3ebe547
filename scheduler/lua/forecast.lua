-- The order of what waits in a queue as it stands, and when each would start.
-- args.tokens, if given: a job that is thinking of coming (args.owner, args.priority).
-- Returns {seconds for the thinking one or '', {id, seconds, id, seconds, ...}}.
local weights, per_second = owner_weights(args.queue, NOW, args.owner), rate(args.queue)
local rows, busy, workers = {}, 0, 0
local ids = redis.call('ZRANGE', 'tandem:size:' .. args.queue, 0, args.limit - 1)
for _, id in ipairs(ids) do
  local job = facts(id)
  if job then rows[#rows + 1] = {weigh(job, weights[job.owner] or 1, NOW, per_second), id, job.tokens} end
end
if args.tokens then
  local job = {created = NOW, owner = args.owner, tokens = args.tokens,
               weight = POLICY.weights[args.priority] or 1}
  rows[#rows + 1] = {weigh(job, weights[job.owner] or 1, NOW, per_second), '', args.tokens}
end
-- What runs now: the rest of it comes first, shared by as many workers as there are.
for _, id in ipairs(redis.call('ZRANGE', 'tandem:leases', 0, -1)) do
  local f = redis.call('HMGET', record(id), 'queue', 'prompt_tokens', 'prefilled_tokens', 'handoff')
  if f[1] == args.queue and not f[4] then
    busy = busy + math.max(0, tonumber(f[2]) - tonumber(f[3] or '0')) / per_second
    workers = workers + 1
  end
end
workers = math.max(workers, 1)
table.sort(rows, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
local answer, own, at = {}, '', busy / workers
for _, row in ipairs(rows) do
  if row[2] == '' then own = stamp(at) else answer[#answer + 1], answer[#answer + 2] = row[2], stamp(at) end
  at = at + row[3] / per_second / workers
end
return {own, answer}
