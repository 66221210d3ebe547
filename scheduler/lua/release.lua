-- Take a run's job away from it and let it wait again, at the front; or end it.
-- args.mode: 'back' (a worker hands its own back; args.parked tokens stay with it), 'prefill'
-- (decode asks for another prefill),
-- 'expired' (its lease ran out), 'dead' (its holder is known to be gone).
-- Returns requeued | failed | cancelled | kept | lost | done.
local key = record(args.id)
local why = foreign(args.id, args.run)
if why then return why end
if args.mode == 'expired' then
  local lease = redis.call('ZSCORE', 'tandem:leases', args.id)
  if lease and tonumber(lease) > NOW then return 'kept' end
end
local stage, queue, worker, attempts, cancel, returns, status = unpack(redis.call('HMGET', key,
  'stage', 'queue', 'worker', 'attempts', 'cancel', 'returns', 'status'))
leave(args.id, stage, queue, args.run, worker)
if args.mode == 'expired' or args.mode == 'dead' then
  -- Its worker can tell no more of it than when it was.
  local enqueued, taken, holder = unpack(redis.call('HMGET', key, 'enqueued_at', 'taken_at', 'holder'))
  keep_notes(args.id, args.run, cmsgpack.pack({
    lane = stage, node = string.match(holder or '', ':(.*)$') or '', queue = queue,
    enqueued = tonumber(enqueued or ''), taken = tonumber(taken or '') or NOW, lost = NOW,
    base = tonumber(taken or '') or NOW, outcome = 'lost: its worker died or froze'}))
else
  keep_notes(args.id, args.run, args.ledger)
end
if cancel == '1' then
  close(args.id, stage, queue, 'canceled', args.shadow_ttl)
  finish(args.id, 'cancelled', args.cancelled, {'reason', 'cancelled'})
  return 'cancelled'
end
if ((args.mode == 'expired' or args.mode == 'dead') and tonumber(attempts) >= args.max_attempts)
   or (args.mode == 'prefill' and tonumber(returns or '0') >= args.max_attempts) then
  close(args.id, stage, queue, 'failed', args.shadow_ttl, args.exception)
  finish(args.id, 'failed', args.failed, {'error', args.error})
  return 'failed'
end
redis.call('HSET', key, 'run', '', 'worker', '', 'holder', '')
unpromise(args.id)
if args.mode == 'back' then redis.call('HINCRBY', key, 'attempts', -1) end
if args.mode == 'back' and args.parked > 0 then
  redis.call('HSET', key, 'parked_by', args.holder, 'parked_tokens', args.parked)
else
  redis.call('HDEL', key, 'parked_by', 'parked_tokens')
end
if args.mode == 'prefill' then
  close(args.id, stage, queue, 'canceled', args.shadow_ttl)
  stage, queue = 'prefill', args.queue
  redis.call('HSET', key, 'stage', stage, 'queue', queue, 'attempts', 0, 'prefilled_tokens', 0)
  redis.call('HDEL', key, 'handoff', 'p_run', 'extend')
  redis.call('HINCRBY', key, 'returns', 1)
  move(args.id, status, 'queued')
  enqueue(args.id, stage, queue, args.shadow, true)
  return 'requeued'
end
move(args.id, status, 'queued')
if redis.call('EXISTS', shadow(shadow_id(args.id, stage))) == 1 then args.shadow = nil end
enqueue(args.id, stage, queue, args.shadow, true)
return 'requeued'
