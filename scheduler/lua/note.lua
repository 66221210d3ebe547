-- Add what came after a job's end to its record, while there is one.
if redis.call('EXISTS', record(args.id)) == 0 then return 0 end
redis.call('HSET', record(args.id), 'l:' .. args.name, args.ledger)
return 1
