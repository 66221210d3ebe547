-- Cancel a job: at once where nothing runs, otherwise by telling whoever runs it.
-- Returns the status after the call, or '' where there is no such job.
local key = record(args.id)
local status, stage, queue, run = unpack(redis.call('HMGET', key, 'status', 'stage', 'queue', 'run'))
if not status then return '' end
if TERMINAL[status] then return status end
if run == '' then
  redis.call('LREM', RQ .. ':queue:' .. queue, 0, shadow_id(args.id, stage))
  unindex(args.id, queue)
  close(args.id, stage, queue, 'canceled', args.shadow_ttl)
  finish(args.id, 'cancelled', args.cancelled, {'reason', 'cancelled', 'cancel', '1'})
  redis.call('PUBLISH', 'tandem:cancel', args.id)
  return 'cancelled'
end
redis.call('HSET', key, 'cancel', '1')
redis.call('PUBLISH', 'tandem:cancel', args.id)
return status
