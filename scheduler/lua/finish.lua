-- End a job under its run: completed | incomplete | failed | cancelled.
-- args.first: number of the first of args.events as their writer counts, or -1.
local key = record(args.id)
local why = foreign(args.id, args.run)
if why then return why end
local stage, queue, worker, seq = unpack(redis.call('HMGET', key, 'stage', 'queue', 'worker', 'seq'))
if args.first > tonumber(seq) then return 'behind' end
leave(args.id, stage, queue, args.run, worker)
keep_notes(args.id, args.run, args.ledger)
local registry = args.status == 'failed' and 'failed' or args.status == 'cancelled' and 'canceled' or 'finished'
close(args.id, stage, queue, registry, args.shadow_ttl, args.exception)
if registry == 'finished' then
  redis.call('HINCRBY', RQ .. ':worker:' .. worker, 'successful_job_count', 1)
elseif registry == 'failed' then
  redis.call('HINCRBY', RQ .. ':worker:' .. worker, 'failed_job_count', 1)
end
if args.parked > 0 then
  local name = 'tandem:parked:' .. redis.call('HGET', key, 'prompt_digest')
  redis.call('HSET', name, 'by', args.holder, 'tokens', args.parked)
  redis.call('EXPIRE', name, args.parked_ttl)
end
finish(args.id, args.status, args.events, args.fields)
return 'ok'
