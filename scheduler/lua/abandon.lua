-- A job's client has gone away: cancel it after a grace, unless it is asked for again before.
-- Returns the status, or '' where there is no such job.
local key = record(args.id)
local status, owner, digest = unpack(redis.call('HMGET', key, 'status', 'owner', 'digest'))
if not status then return '' end
if TERMINAL[status] then return status end
redis.call('ZADD', 'tandem:abandoned', stamp(NOW + args.grace), args.id)
if digest ~= '' then
  redis.call('SET', 'tandem:twin:' .. owner .. ':' .. digest, args.id, 'EX', math.ceil(args.grace))
end
return status
