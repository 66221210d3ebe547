-- A worker's heartbeat: its registration, its leases and how far each run is.
-- args.runs: list of {id, run, prefilled tokens or -1}. Returns per run: ok | lost | cancel.
local worker = RQ .. ':worker:' .. args.worker
-- A heartbeat that was under way while the worker signed off must not bring it back.
if redis.call('HEXISTS', worker, 'death') == 0 then
  redis.call('HSET', worker, unpack(args.fields))
  redis.call('EXPIRE', worker, args.ttl)
  redis.call('SADD', RQ .. ':workers', worker)
  redis.call('SADD', RQ .. ':workers:' .. args.queue, worker)
end
local answers = {}
for i, entry in ipairs(args.runs) do
  local id, run, prefilled = unpack(entry)
  if foreign(id, run) then
    answers[i] = 'lost'
  else
    local key = record(id)
    local stage, cancel, before = unpack(redis.call('HMGET', key, 'stage', 'cancel', 'prefilled_tokens'))
    local jid = shadow_id(id, stage)
    local member = jid .. ':' .. run
    redis.call('ZADD', 'tandem:leases', stamp(NOW + args.lease), id)
    -- Not XX: RQ's own clean-up may have taken the entry away, and the lease is what counts.
    redis.call('ZADD', RQ .. ':wip:' .. args.queue, stamp(NOW + args.lease), member)
    redis.call('SADD', worker .. ':executions', member)
    redis.call('HSET', RQ .. ':execution:' .. member, 'id', run, 'job_id', jid,
               'last_heartbeat', stamp(NOW), 'worker_name', args.worker)
    redis.call('HSETNX', RQ .. ':execution:' .. member, 'created_at', stamp(NOW))
    redis.call('EXPIRE', RQ .. ':execution:' .. member, args.lease + 60)
    redis.call('ZADD', RQ .. ':executions:' .. jid, stamp(NOW + args.lease + 60), run)
    redis.call('EXPIRE', RQ .. ':executions:' .. jid, args.lease + 60)
    if redis.call('EXISTS', shadow(jid)) == 1 then
      redis.call('HSET', shadow(jid), 'status', 'started', 'last_heartbeat', args.iso)
      redis.call('ZREM', RQ .. ':failed:' .. args.queue, jid)
    end
    if prefilled > tonumber(before or '0') then redis.call('HSET', key, 'prefilled_tokens', prefilled) end
    answers[i] = cancel == '1' and 'cancel' or 'ok'
  end
end
redis.call('EXPIRE', worker .. ':executions', args.lease + 60)
return answers
