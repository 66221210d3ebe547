-- Hand the best waiting job of a queue to a worker: list entry, record, lease and RQ execution at
-- once. Returns nil, or {id, record, token ids, time}. A call repeated with a run gets the same job.
local running = RQ .. ':worker:' .. args.worker .. ':executions'
local function answer(id)
  return {id, redis.call('HGETALL', record(id)), redis.call('GET', 'tandem:prompt:' .. id) or '',
          stamp(NOW)}
end
for _, member in ipairs(redis.call('SMEMBERS', running)) do
  local id, run = string.match(member, '^(resp_%x+)%-[pd]:(.*)$')
  if run == args.run and redis.call('HGET', record(id), 'run') == run then return answer(id) end
end

local list = RQ .. ':queue:' .. args.queue

-- The stage and status of a job that may be taken, or nil.
local function takeable(id, stage)
  local status, at, run = unpack(redis.call('HMGET', record(id), 'status', 'stage', 'run'))
  if status and not TERMINAL[status] and run == '' and (not stage or at == stage) then return at, status end
end

local id, jid, stage, status
while not id do
  local job = best(args.queue, args.holder, NOW, owner_weights(args.queue, NOW))
  if not job then break end
  unindex(job.id, args.queue)
  stage, status = takeable(job.id)
  if stage and redis.call('LREM', list, 1, shadow_id(job.id, stage)) == 1 then
    id, jid = job.id, shadow_id(job.id, stage)
    if job.need > 0 then redis.call('ZADD', 'tandem:promised:' .. job.node, job.need, id) end
    charge(args.queue, job.owner, job.tokens, NOW)
  end
end
if not id and redis.call('EXISTS', 'tandem:size:' .. args.queue) == 1 then return nil end
while not id do
  -- Nothing of ours is indexed: what is listed all the same was pushed by somebody else.
  jid = redis.call('LPOP', list)
  if not jid then return nil end
  local named, letter = string.match(jid, '^(resp_%x+)%-([pd])$')
  if named then stage, status = takeable(named, letter == 'd' and 'decode' or 'prefill') end
  if named and stage then
    id = named
  elseif redis.call('EXISTS', shadow(jid)) == 1 then
    -- Not a waiting job of ours: never run, and shown as failed.
    redis.call('HSET', shadow(jid), 'status', 'failed')
    redis.call('ZADD', RQ .. ':failed:' .. args.queue, stamp(NOW + 86400), jid)
    redis.call('EXPIRE', shadow(jid), 86400)
  end
end

local key = record(id)
if stage == 'decode' then unpromise(id) end
local alone = stage == 'decode' and redis.call('HEXISTS', key, 'handoff') == 0
redis.call('HSET', key, 'run', args.run, 'worker', args.worker, 'holder', args.holder,
           'taken_at', stamp(NOW))
redis.call('HINCRBY', key, 'attempts', 1)
move(id, status, (stage == 'prefill' or alone) and 'prefilling' or 'decoding')
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
return answer(id)
