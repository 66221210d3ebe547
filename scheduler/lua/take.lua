-- Hand the next job of a queue to a worker: list entry, record, lease and RQ execution at once.
-- Returns nil, or {id, record, token ids}. A repeated call with the same run gets the same job.
local running = RQ .. ':worker:' .. args.worker .. ':executions'
for _, member in ipairs(redis.call('SMEMBERS', running)) do
  if string.sub(member, -#args.run) == args.run then
    local id = string.match(member, '^(resp_%x+)%-[pd]:')
    if id and redis.call('HGET', record(id), 'run') == args.run then
      return {id, redis.call('HGETALL', record(id)), redis.call('GET', 'tandem:prompt:' .. id) or ''}
    end
  end
end

local list = RQ .. ':queue:' .. args.queue
local id, jid, stage, status
while true do
  jid = redis.call('LPOP', list)
  if not jid then return nil end
  local letter
  id, letter = string.match(jid, '^(resp_%x+)%-([pd])$')
  if id then
    local at, run
    status, at, run = unpack(redis.call('HMGET', record(id), 'status', 'stage', 'run'))
    stage = letter == 'd' and 'decode' or 'prefill'
    if status and not TERMINAL[status] and at == stage and run == '' then break end
  end
  -- Not a waiting job of ours: never run, and shown as failed where RQ still knows it.
  if redis.call('EXISTS', shadow(jid)) == 1 then
    redis.call('HSET', shadow(jid), 'status', 'failed')
    redis.call('ZADD', RQ .. ':failed:' .. args.queue, stamp(NOW + 86400), jid)
    redis.call('EXPIRE', shadow(jid), 86400)
  end
end

local key = record(id)
local local_prefill = stage == 'decode' and redis.call('HEXISTS', key, 'handoff') == 0
redis.call('HSET', key, 'run', args.run, 'worker', args.worker, 'holder', args.holder)
redis.call('HINCRBY', key, 'attempts', 1)
move(id, status, (stage == 'prefill' or local_prefill) and 'prefilling' or 'decoding')
if redis.call('HSETNX', key, 'begun', stamp(NOW)) == 1 then append(id, args.first) end
redis.call('ZADD', 'tandem:leases', stamp(NOW + args.lease), id)

local member = jid .. ':' .. args.run
if redis.call('EXISTS', shadow(jid)) == 0 then redis.call('HSET', shadow(jid), unpack(args.blank)) end
redis.call('HSET', shadow(jid), 'status', 'started', 'started_at', args.iso,
           'last_heartbeat', args.iso, 'worker_name', args.worker, 'origin', args.queue)
redis.call('PERSIST', shadow(jid))
redis.call('HSET', RQ .. ':execution:' .. member, 'id', args.run, 'job_id', jid,
           'created_at', stamp(NOW), 'last_heartbeat', stamp(NOW), 'worker_name', args.worker)
redis.call('EXPIRE', RQ .. ':execution:' .. member, args.lease + 60)
redis.call('ZADD', RQ .. ':executions:' .. jid, stamp(NOW + args.lease + 60), args.run)
redis.call('EXPIRE', RQ .. ':executions:' .. jid, args.lease + 60)
redis.call('ZADD', RQ .. ':wip:' .. args.queue, stamp(NOW + args.lease), member)
redis.call('SADD', running, member)
redis.call('EXPIRE', running, args.lease + 60)
if redis.call('LLEN', list) > 0 then wake(args.queue) end
return {id, redis.call('HGETALL', key), redis.call('GET', 'tandem:prompt:' .. id) or ''}
