-- The simulator's clock: the same rule on jobs that only exist as numbers.
-- args.arrivals: list of {id, time, tokens, owner, class}; args.park: {id, tokens done} or nil.
-- args.take: return the next job's {id, tokens}, or nil.
for _, job in ipairs(args.arrivals) do
  redis.call('HSET', record(job[1]), 'created_at', stamp(job[2]), 'prompt_tokens', job[3],
             'owner', job[4], 'priority', job[5], 'held_tokens', 0)
  index(job[1], args.queue)
end
if args.park then
  redis.call('HSET', record(args.park[1]), 'parked_by', args.holder, 'parked_tokens', args.park[2])
  index(args.park[1], args.queue)
end
if not args.take then return nil end
local job = best(args.queue, args.holder, args.now, owner_weights(args.queue, args.now))
if not job then return nil end
unindex(job.id, args.queue)
charge(args.queue, job.owner, job.tokens, args.now)
return {job.id, job.tokens}
