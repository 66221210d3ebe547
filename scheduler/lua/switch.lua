-- The home of a conversation whose records and states are at another node as well changes, if no
-- job of it lives and none was accepted since they were copied; see scheduler.homes.
-- Returns ok | busy | changed.
if lives(args.conversation) then return 'busy' end
local node, n = unpack(redis.call('HMGET', 'tandem:home:' .. args.conversation, 'node', 'n'))
if (node or args.from) ~= args.from or (n or '0') ~= args.n then return 'changed' end
settle_home(args.conversation, args.node, args.keep_home)
return 'ok'
