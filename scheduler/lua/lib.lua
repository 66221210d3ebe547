-- Shared by every script; prepended to it. One call = one atomic step on our record and on the
-- keys of its RQ shadow. Keys are built from ids, so the server must not be a cluster.
local RQ = '@RQ@'
local args = cmsgpack.unpack(ARGV[1])
-- Seconds for which the token ids of an ended job are kept: its turn has them in the store.
local PROMPT_KEEP = 3600
local TERMINAL = {completed = true, incomplete = true, failed = true, cancelled = true}

local clock = redis.call('TIME')
local NOW = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local function stamp(t) return string.format('%.6f', t) end

local function record(id) return 'tandem:job:' .. id end
local function shadow_id(id, stage) return id .. (stage == 'decode' and '-d' or '-p') end
local function shadow(jid) return RQ .. ':job:' .. jid end

local function wake(queue)
  local key = 'tandem:wake:' .. queue
  redis.call('LPUSH', key, '1')
  redis.call('LTRIM', key, 0, 0)
end

-- Change the state, its index and its time together.
local function move(id, old, new)
  if old == new then return end
  if old then redis.call('ZREM', 'tandem:jobs:' .. old, id) end
  redis.call('ZADD', 'tandem:jobs:' .. new, stamp(NOW), id)
  redis.call('HSET', record(id), 'status', new, 't_' .. new, stamp(NOW))
end

-- Publish what was appended, a list of {id, number of the first event, events}: who follows many
-- logs hears of all of them over one connection, and finds in the logs what it missed.
local function tell(live)
  if #live > 0 then redis.call('PUBLISH', 'tandem:live', cmsgpack.pack(live)) end
end

-- Append packed events; entry id = number of the event + 1. Returns the count of events. With
-- `live` what is to be told is left there. `seq`: how many there are, where that is known.
local function append(id, events, live, seq)
  seq = seq or tonumber(redis.call('HGET', record(id), 'seq') or '0')
  local said = {id, seq, events}
  if live then live[#live + 1] = said else tell({said}) end
  for _, event in ipairs(events) do
    seq = seq + 1
    redis.call('XADD', 'tandem:events:' .. id, seq .. '-0', 'e', event)
  end
  redis.call('HSET', record(id), 'seq', seq)
  return seq
end

-- A measured rate: a moving average over about ten.
local function learn(name, rate)
  local before = tonumber(redis.call('GET', name) or rate)
  redis.call('SET', name, before + (rate - before) / 10)
end

local index, unindex  -- defined by the policy

-- Memory promised at a decode node for the state of a job is free again.
local function unpromise(id)
  if redis.call('ZREM', 'tandem:promised:' .. (redis.call('HGET', record(id), 'node') or ''), id) == 1 then
    wake('prefill')
  end
end

-- Whether a job of a conversation, or one that branches from it, has yet to end, `but` left out.
local function lives(talk, but)
  for _, id in ipairs(redis.call('SMEMBERS', 'tandem:at:' .. talk)) do
    local status = id ~= but and redis.call('HGET', record(id), 'status')
    if status and not TERMINAL[status] then return true end
  end
  return false
end

-- Have a conversation at home on a node; who looked before sees by `n` that it has changed.
local function settle_home(talk, node, seconds)
  local home = 'tandem:home:' .. talk
  redis.call('HSET', home, 'node', node)
  redis.call('HINCRBY', home, 'n', 1)
  redis.call('EXPIRE', home, seconds)
end

-- Put the RQ job of a stage into its queue. `fields`: flat list, made by RQ's own Job.to_dict().
local function enqueue(id, stage, queue, fields, front)
  local jid = shadow_id(id, stage)
  if fields then
    redis.call('DEL', shadow(jid))
    redis.call('HSET', shadow(jid), unpack(fields))
  else
    redis.call('HSET', shadow(jid), 'status', 'queued', 'worker_name', '')
    redis.call('PERSIST', shadow(jid))
  end
  redis.call(front and 'LPUSH' or 'RPUSH', RQ .. ':queue:' .. queue, jid)
  redis.call('SADD', RQ .. ':queues', RQ .. ':queue:' .. queue)
  redis.call('HSET', record(id), 'enqueued_at', stamp(NOW))
  index(id, queue)
  wake(queue)
end

-- What a run has noted of itself; `ledger`: packed, empty where nothing was kept.
local function keep_notes(id, run, ledger)
  if ledger and ledger ~= '' then redis.call('HSET', record(id), 'l:' .. run, ledger) end
end

-- End one execution: RQ's registries of what runs, and our lease.
local function leave(id, stage, queue, run, worker)
  local jid = shadow_id(id, stage)
  local member = jid .. ':' .. run
  redis.call('ZREM', RQ .. ':wip:' .. queue, member)
  redis.call('DEL', RQ .. ':execution:' .. member)
  redis.call('ZREM', RQ .. ':executions:' .. jid, run)
  redis.call('SREM', RQ .. ':worker:' .. worker .. ':executions', member)
  redis.call('ZREM', 'tandem:leases', id)
end

-- Give the RQ job of a stage its last status. `registry`: finished | failed | canceled.
local function close(id, stage, queue, registry, ttl, exception)
  local jid = shadow_id(id, stage)
  for _, name in ipairs({'finished', 'failed', 'canceled'}) do
    redis.call('ZREM', RQ .. ':' .. name .. ':' .. queue, jid)
  end
  local key = RQ .. ':' .. registry .. ':' .. queue
  redis.call('ZREMRANGEBYSCORE', key, 0, stamp(registry == 'canceled' and NOW - ttl or NOW))
  if redis.call('EXISTS', shadow(jid)) == 0 then return end
  redis.call('HSET', shadow(jid), 'status', registry, 'ended_at', args.iso)
  if exception then redis.call('HSET', shadow(jid), 'exc_info', exception) end
  redis.call('EXPIRE', shadow(jid), ttl)
  redis.call('ZADD', key, stamp(registry == 'canceled' and NOW or NOW + ttl), jid)
end

-- The one way into a terminal state: its event, its record, its locks and its lifetimes.
local function finish(id, status, events, fields)
  local key = record(id)
  local old, locked, talk, past = unpack(redis.call('HMGET', key,
    'status', 'locked', 'conversation', 'past'))
  append(id, events)
  if fields and #fields > 0 then redis.call('HSET', key, unpack(fields)) end
  move(id, old, status)
  if locked and redis.call('GET', 'tandem:turn:' .. locked) == id then
    redis.call('DEL', 'tandem:turn:' .. locked)
  end
  for _, at in ipairs({talk or '', past or ''}) do
    if at ~= '' then redis.call('SREM', 'tandem:at:' .. at, id) end
  end
  redis.call('ZREM', 'tandem:leases', id)
  redis.call('ZREM', 'tandem:attended', id)
  redis.call('ZREM', 'tandem:abandoned', id)
  redis.call('DEL', 'tandem:waiting:' .. id)
  unpromise(id)
  -- Of a job that is not to be stored nothing is left once its client has its answer.
  local brief = redis.call('HGET', key, 'brief')
  local keep = brief and math.min(args.keep, tonumber(brief)) or args.keep
  if brief then
    redis.call('ZREM', 'tandem:jobs:' .. status, id)
    redis.call('ZADD', 'tandem:brief', stamp(NOW), id)  -- counted by the metrics, then forgotten
    redis.call('ZREMRANGEBYSCORE', 'tandem:brief', 0, stamp(NOW - 3600))
  end
  redis.call('EXPIRE', key, keep)
  redis.call('EXPIRE', 'tandem:events:' .. id, keep)
  redis.call('EXPIRE', 'tandem:prompt:' .. id, math.min(keep, PROMPT_KEEP))
  redis.call('ZREMRANGEBYSCORE', 'tandem:jobs:' .. status, 0, stamp(NOW - args.keep))
end

-- Cancel a job: at once where nothing runs, otherwise by telling whoever runs it.
-- Returns the status after that, or '' where there is no such job.
local function call_off(id)
  redis.call('ZREM', 'tandem:attended', id)
  redis.call('ZREM', 'tandem:abandoned', id)
  local status, stage, queue, run = unpack(redis.call('HMGET', record(id), 'status', 'stage', 'queue', 'run'))
  if not status then return '' end
  if TERMINAL[status] then return status end
  if run == '' then
    redis.call('LREM', RQ .. ':queue:' .. queue, 0, shadow_id(id, stage))
    unindex(id, queue)
    close(id, stage, queue, 'canceled', args.shadow_ttl)
    finish(id, 'cancelled', args.cancelled, {'reason', 'cancelled', 'cancel', '1'})
    status = 'cancelled'
  else
    redis.call('HSET', record(id), 'cancel', '1')
  end
  redis.call('PUBLISH', 'tandem:cancel', id)
  return status
end

-- Who waits for a foreground job is in `tandem:waiting:ID` to the end of its lease. The job is in
-- `tandem:attended` to the end of the last of them; when nobody waits any more, it is in
-- `tandem:abandoned` instead, until it is called off. One that is to be cancelled is in neither.

-- A client waits for a live job; '' is one that nobody will say of whether it still does.
local function attend(id, client)
  redis.call('ZREM', 'tandem:abandoned', id)
  if client == '' then return end
  local waiting = 'tandem:waiting:' .. id
  redis.call('ZADD', waiting, stamp(NOW + args.client_lease), client)
  redis.call('EXPIRE', waiting, math.ceil(args.client_lease) + 86400)  -- in case nobody removes it
  redis.call('ZADD', 'tandem:attended', 'GT', stamp(NOW + args.client_lease), id)
end

-- Nobody waits for a job any more: it is called off after a grace, unless it is asked for before.
-- Doing so again changes nothing. Returns as call_off.
local function forsake(id, grace)
  redis.call('ZREM', 'tandem:attended', id)
  redis.call('DEL', 'tandem:waiting:' .. id)
  local status, cancel, owner, digest = unpack(redis.call('HMGET', record(id), 'status', 'cancel', 'owner', 'digest'))
  if not status then return '' end
  if TERMINAL[status] or cancel == '1' then return status end
  if grace <= 0 then return call_off(id) end
  if redis.call('ZADD', 'tandem:abandoned', 'NX', stamp(NOW + grace), id) == 1 and digest ~= '' then
    redis.call('SET', 'tandem:twin:' .. owner .. ':' .. digest, id, 'EX', math.ceil(grace))
  end
  return status
end

-- nil where `run` is the record's live execution, otherwise why it is not: done | lost.
local function foreign(id, run)
  local status, current = unpack(redis.call('HMGET', record(id), 'status', 'run'))
  if not status or current ~= run then return 'lost' end
  if TERMINAL[status] then return 'done' end
  return nil
end
