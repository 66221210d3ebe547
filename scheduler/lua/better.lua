-- At a chunk boundary: is a job waiting that should run before the rest of this one?
-- Returns 1 where its key is below this one's by the factor `gain`, otherwise 0.
local now = args.now or NOW
local running = facts(args.id)
if not running then return 0 end
running.tokens = math.max(1, tonumber(redis.call('HGET', record(args.id), 'prompt_tokens')) - args.prefilled)
local weights = owner_weights(args.queue, now, running.owner)
local job, key = best(args.queue, args.holder, now, weights)
if not job then return 0 end
local own = weigh(running, weights[running.owner] or 1, now, rate(args.queue))
if own < 0 then return 0 end
return (key < 0 or key * args.gain < own) and 1 or 0
