-- At a chunk boundary: who waits? Returns {better, interactive}.
-- better: 1 where the best waiting job's key is below this one's by the factor `gain`, so that it
-- should run before the rest of this one. interactive: 1 where an interactive job waits that is
-- shorter than the rest of this one, so that the next boundary should come soon.
local now = args.now or NOW
local running = facts(args.id)
if not running then return {0, 0} end
running.tokens = math.max(1, tonumber(redis.call('HGET', record(args.id), 'prompt_tokens')) - args.prefilled)
local short = 0
for _, id in ipairs(redis.call('ZRANGE', 'tandem:size:' .. args.queue, 0, POLICY.window - 1)) do
  local f = redis.call('HMGET', record(id), 'priority', 'prompt_tokens')
  if f[1] == 'interactive' and tonumber(f[2]) < running.tokens then short = 1 end
end
local weights = owner_weights(args.queue, now, running.owner)
local job, key = best(args.queue, args.holder, now, weights)
if not job then return {0, short} end
local own = weigh(running, weights[running.owner] or 1, now, rate(args.queue))
if own < 0 then return {0, short} end
return {(key < 0 or key * args.gain < own) and 1 or 0, short}
