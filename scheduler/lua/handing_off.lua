-- The prefill is computed; its state is on its way to the decode node.
local why = foreign(args.id, args.run)
if why then return why end
local key = record(args.id)
if redis.call('HGET', key, 'cancel') == '1' then return 'cancel' end
move(args.id, redis.call('HGET', key, 'status'), 'handing_off')
if args.prefilled >= 0 then redis.call('HSET', key, 'prefilled_tokens', args.prefilled) end
return 'ok'
