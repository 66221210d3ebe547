-- The simulator's clock: the same rule on jobs that only exist as numbers.
-- args.arrivals: list of {id, time, tokens, owner, class}, or with {stage, tokens held, node, tokens
-- to hand over or ''} after that. args.park: {id, tokens done} or nil. args.free: jobs whose
-- promised memory is free again. args.gone: jobs that have left. args.take: return the next job's
-- {id, tokens}, or nil.
for _, job in ipairs(args.arrivals) do
  local key = record(job[1])
  redis.call('HSET', key, 'created_at', stamp(job[2]), 'prompt_tokens', job[3],
             'owner', job[4], 'priority', job[5], 'held_tokens', job[7] or 0)
  if job[6] then redis.call('HSET', key, 'stage', job[6], 'node', job[8]) end
  if job[9] and job[9] ~= '' then redis.call('HSET', key, 'handoff', job[9]) end
  index(job[1], args.queue)
end
for _, id in ipairs(args.free or {}) do unpromise(id) end
for _, id in ipairs(args.gone or {}) do redis.call('DEL', record(id)) end
if args.park then
  redis.call('HSET', record(args.park[1]), 'parked_by', args.holder, 'parked_tokens', args.park[2])
  index(args.park[1], args.queue)
end
if not args.take then return nil end
local job = best(args.queue, args.holder, args.now, owner_weights(args.queue, args.now))
if not job then return nil end
unindex(job.id, args.queue)
if job.need > 0 then redis.call('ZADD', 'tandem:promised:' .. job.node, job.need, job.id) end
charge(args.queue, job.owner, job.tokens, args.now)
return {job.id, job.tokens}
