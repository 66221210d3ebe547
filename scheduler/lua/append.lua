-- Append events of a run. args.first: number of the first one, as its writer counts.
-- Returns {ok | lost | done | behind, count of events}.
local key = record(args.id)
local seq = tonumber(redis.call('HGET', key, 'seq') or '0')
local why = foreign(args.id, args.run)
if why then return {why, seq} end
if args.first > seq then return {'behind', seq} end
local fresh = {}
for i = seq - args.first + 1, #args.events do fresh[#fresh + 1] = args.events[i] end
if #fresh > 0 then seq = append(args.id, fresh) end
if args.tokens then
  if redis.call('HSETNX', key, 't_first_token', stamp(NOW)) == 1 then
    -- How fast this decode node extends a state by itself.
    local f = redis.call('HMGET', key, 'handoff', 'prompt_tokens', 'held_tokens', 't_prefilling', 'node', 'stage')
    local tokens = tonumber(f[2] or '0') - tonumber(f[3] or '0')
    if f[6] == 'decode' and not f[1] and f[4] and tokens >= 64 then
      learn('tandem:rate:extend:' .. f[5], tokens / math.max(0.001, NOW - tonumber(f[4])))
    end
  end
  -- Also from a prefill node, which may begin the answer.
  move(args.id, redis.call('HGET', key, 'status'), 'decoding')
end
return {'ok', seq}
