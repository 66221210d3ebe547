-- Put a waiting job whose RQ entry has vanished (deleted in a dashboard, say) back into its queue.
local key = record(args.id)
local status, stage, queue, run = unpack(redis.call('HMGET', key, 'status', 'stage', 'queue', 'run'))
if not status or TERMINAL[status] or run ~= '' or stage ~= args.stage then return 'kept' end
local jid = shadow_id(args.id, stage)
if redis.call('LPOS', RQ .. ':queue:' .. queue, jid) then
  index(args.id, queue)
  return 'kept'
end
for _, name in ipairs({'finished', 'failed', 'canceled'}) do
  redis.call('ZREM', RQ .. ':' .. name .. ':' .. queue, jid)
end
enqueue(args.id, stage, queue, args.shadow, true)
return 'requeued'
