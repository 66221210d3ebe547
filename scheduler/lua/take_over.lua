-- A prefill that waits goes to its decode node, which computes the prompt by itself.
-- Returns moved | kept.
local key = record(args.id)
local status, stage, queue, run, node =
  unpack(redis.call('HMGET', key, 'status', 'stage', 'queue', 'run', 'node'))
if status ~= 'queued' or stage ~= 'prefill' or run ~= '' or node ~= args.node then return 'kept' end
redis.call('LREM', RQ .. ':queue:' .. queue, 0, shadow_id(args.id, stage))
unindex(args.id, queue)
close(args.id, stage, queue, 'canceled', args.shadow_ttl)
redis.call('HSET', key, 'stage', 'decode', 'queue', args.queue, 'attempts', 0,
           'prefilled_tokens', 0)
redis.call('HDEL', key, 'parked_by', 'parked_tokens')
unpromise(args.id)
enqueue(args.id, 'decode', args.queue, args.shadow)
return 'moved'
