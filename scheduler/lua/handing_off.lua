-- The prefill is computed; its state is on its way to the decode node.
local why = foreign(args.id, args.run)
if why then return why end
local key = record(args.id)
if redis.call('HGET', key, 'cancel') == '1' then return 'cancel' end
local status, queue = unpack(redis.call('HMGET', key, 'status', 'queue'))
move(args.id, status, 'handing_off')
-- The measured rate, of prompts that were worth measuring.
local tokens = args.prefilled - args.begun_at
local began = redis.call('HGET', key, 't_prefilling')
if tokens >= 64 and began then
  learn('tandem:rate:' .. queue, tokens / math.max(0.001, NOW - tonumber(began)))
end
if args.prefilled >= 0 then redis.call('HSET', key, 'prefilled_tokens', args.prefilled) end
return 'ok'
