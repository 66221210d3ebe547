-- A prefill that waits goes to its decode node, which computes the prompt by itself.
-- Returns moved | kept.
local key = record(args.id)
local status, stage, queue, run, node, since =
  unpack(redis.call('HMGET', key, 'status', 'stage', 'queue', 'run', 'node', 'enqueued_at'))
if status ~= 'queued' or stage ~= 'prefill' or run ~= '' or node ~= args.node then return 'kept' end
redis.call('LREM', RQ .. ':queue:' .. queue, 0, shadow_id(args.id, stage))
unindex(args.id, queue)
close(args.id, stage, queue, 'canceled', args.shadow_ttl)
redis.call('HSET', key, 'stage', 'decode', 'queue', args.queue, 'attempts', 0,
           'prefilled_tokens', 0)
redis.call('HDEL', key, 'parked_by', 'parked_tokens')
unpromise(args.id)
-- The wait that ends here belongs to no run: the ledger has it as a piece of its own, under a name
-- that the next one, should it go back to prefill and be taken over again, does not have.
if tonumber(since) then
  keep_notes(args.id, 'alone ' .. since, cmsgpack.pack({
    lane = 'queue', queue = queue, base = tonumber(since), moved = NOW}))
end
enqueue(args.id, 'decode', args.queue, args.shadow)
return 'moved'
