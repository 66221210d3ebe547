-- Give a running answer, whose state and records are at another decode node, to that node, and the
-- conversation with it; see scheduler.homes. Returns ok | kept (another job of the conversation
-- lives, or it is not at home here) | cancel | lost | done.
local key = record(args.id)
local status, before, cancel, queue, worker, talk, past = unpack(redis.call('HMGET', key,
  'status', 'm_run', 'cancel', 'queue', 'worker', 'conversation', 'past'))
if status and before == args.run then return 'ok' end
local why = foreign(args.id, args.run)
if why then return why end
if cancel ~= '1' and talk and talk ~= '' then
  if lives(talk, args.id) then return 'kept' end
  local home = redis.call('HGET', 'tandem:home:' .. talk, 'node')
  if home and home ~= args.from then return 'kept' end
end
leave(args.id, 'decode', queue, args.run, worker)
keep_notes(args.id, args.run, args.ledger)
if cancel == '1' then
  close(args.id, 'decode', queue, 'canceled', args.shadow_ttl)
  finish(args.id, 'cancelled', args.cancelled, {'reason', 'cancelled'})
  return 'cancel'
end
-- What it branches from was copied with it, and is free to go.
if past and past ~= '' then redis.call('SREM', 'tandem:at:' .. past, args.id) end
if talk and talk ~= '' then settle_home(talk, args.node, args.keep_home) end
move(args.id, status, 'handing_off')
redis.call('HINCRBY', key, 'attempts', -1)
redis.call('HSET', key, 'node', args.node, 'queue', args.queue, 'run', '', 'm_run', args.run,
           'worker', '', 'holder', '', 'handoff', args.handoff)
enqueue(args.id, 'decode', args.queue, args.shadow, true)
return 'ok'
