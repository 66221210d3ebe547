-- The home of a conversation whose records and states are at another node as well changes, if no
-- job of it lives and none was accepted since they were copied; see scheduler.homes.
-- Returns ok | busy | changed.
local home = 'tandem:home:' .. args.conversation
for _, id in ipairs(redis.call('SMEMBERS', 'tandem:at:' .. args.conversation)) do
  local status = redis.call('HGET', record(id), 'status')
  if status and not TERMINAL[status] then return 'busy' end
end
local node, n = unpack(redis.call('HMGET', home, 'node', 'n'))
if (node or args.from) ~= args.from or (n or '0') ~= args.n then return 'changed' end
redis.call('HSET', home, 'node', args.node)
redis.call('HINCRBY', home, 'n', 1)
redis.call('EXPIRE', home, args.keep_home)
return 'ok'
