-- Keep the copies of a conversation for node `args.value`, which sends them; or, where that is
-- empty, for the moment in which node `args.own` deletes its left-over copy, which waits for no
-- claim of its own from before it stopped. See scheduler.homes. Returns ok | held.
local key = 'tandem:moving:' .. args.conversation
local held = redis.call('GET', key)
if held == '' or (held and args.value == '' and held ~= args.own) then return 'held' end
redis.call('SET', key, args.value, 'EX', args.seconds)
return 'ok'
