-- End the prefill stage and enqueue the decode stage, in one step.
local key = record(args.id)
local status, before, cancel, queue, worker = unpack(
  redis.call('HMGET', key, 'status', 'p_run', 'cancel', 'queue', 'worker'))
if status and before == args.run then return 'ok' end
local why = foreign(args.id, args.run)
if why then return why end
leave(args.id, 'prefill', queue, args.run, worker)
keep_notes(args.id, args.run, args.ledger)
if cancel == '1' then
  close(args.id, 'prefill', queue, 'canceled', args.shadow_ttl)
  finish(args.id, 'cancelled', args.cancelled, {'reason', 'cancelled'})
  return 'cancel'
end
close(args.id, 'prefill', queue, 'finished', args.shadow_ttl)
redis.call('HINCRBY', RQ .. ':worker:' .. worker, 'successful_job_count', 1)
move(args.id, status, 'handing_off')
redis.call('HINCRBY', key, 'p_attempts', redis.call('HGET', key, 'attempts'))
redis.call('HSET', key, 'stage', 'decode', 'queue', args.queue, 'run', '', 'p_run', args.run,
           'p_worker', worker, 'worker', '', 'attempts', 0, 'handoff', args.handoff)
if args.link > 0 then
  learn('tandem:rate:link:' .. (redis.call('HGET', key, 'node') or ''), args.link)
end
if args.prefilled >= 0 then redis.call('HSET', key, 'prefilled_tokens', args.prefilled) end
enqueue(args.id, 'decode', args.queue, args.shadow)
return 'ok'
