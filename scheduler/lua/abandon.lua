-- One of a job's clients waits no longer; the last one forsakes it. May be said twice.
-- Returns the status after the call, or '' where there is no such job.
local waiting = 'tandem:waiting:' .. args.id
redis.call('ZREM', waiting, args.client)
if redis.call('ZCOUNT', waiting, stamp(NOW), '+inf') > 0 then
  return redis.call('HGET', record(args.id), 'status') or ''
end
return forsake(args.id, args.grace)
