-- One of a job's clients has gone away. The last one leaves it to be cancelled after a grace, unless
-- it is asked for again before; a grace of 0 leaves that to the caller.
-- Returns {status, 1 if nobody waits any more}, the status '' where there is no such job.
local key = record(args.id)
local status, owner, digest, waiting = unpack(redis.call('HMGET', key,
  'status', 'owner', 'digest', 'waiting'))
if not status then return {'', 0} end
if TERMINAL[status] then return {status, 0} end
local others = math.max(0, (tonumber(waiting) or 0) - 1)
redis.call('HSET', key, 'waiting', others)
if others > 0 then return {status, 0} end
if args.grace > 0 then
  redis.call('ZADD', 'tandem:abandoned', stamp(NOW + args.grace), args.id)
  if digest ~= '' then
    local twin = 'tandem:twin:' .. owner .. ':' .. digest
    redis.call('SET', twin, args.id, 'EX', math.ceil(args.grace))
  end
end
return {status, 1}
