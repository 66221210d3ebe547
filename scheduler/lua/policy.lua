-- Which waiting job is next. The whole rule:
--
--   s   = prompt tokens still to compute / measured rate    seconds of work; a prefix that this
--                                                           worker keeps parked counts as done,
--                                                           a stored one where decode restores it
--   W   = class weight * owner weight                       1: a normal job of a modest owner
--   x   = (wait + s) / (horizon * W)                        the part of its time a job has used;
--                                                           with a deadline, of the time it gave
--   key = s * W * (1 - x^2)                                 smallest first
--   x >= 1: before all others, the one longest overdue first
--   owner weight = 1 + share * n * used(owner) / used(all)  n owners wait; used: tokens computed
--                                                           for them, halved every HALF seconds
--
-- Shortest remaining work first is best for the mean (Schrage 1968). The factor 1 - x^2 ages a job
-- slowly at first and surely at last: nothing waits longer than its horizon and what is overdue
-- before it. Weights by decayed use are what fair-share schedulers do.
local POLICY = args.policy or {}
local HALF = 300

local function rate(queue)
  return tonumber(redis.call('GET', 'tandem:rate:' .. queue) or POLICY.rate)
end

-- What the rule needs to know of a job, for a worker that keeps its own parked prefixes.
local function facts(id, holder)
  local f = redis.call('HMGET', record(id), 'created_at', 'deadline', 'owner', 'priority',
                       'prompt_tokens', 'held_tokens', 'parked_by', 'parked_tokens', 'handoff',
                       'node', 'stage', 'extend')
  if not f[1] then return nil end
  -- A prefill worker has no stored states: what comes to it is computed from the start, unless
  -- the decode node lends it one to extend.
  local held = (f[11] == 'prefill' and f[12] ~= 'prefill') and 0 or tonumber(f[6] or '0')
  if f[7] and (holder == nil or f[7] == holder) then held = math.max(held, tonumber(f[8])) end
  return {
    id = id, created = tonumber(f[1]), deadline = tonumber(f[2] or ''), owner = f[3] or '',
    weight = POLICY.weights[f[4] or 'normal'] or 1,
    tokens = f[9] and 1 or math.max(1, tonumber(f[5]) - held),
    prompt = tonumber(f[5]), node = f[10] or '',
  }
end

local function weigh(job, owner_weight, now, per_second)
  local s, weight = job.tokens / per_second, job.weight * owner_weight
  local span = POLICY.horizon * weight
  if job.deadline then span = math.max(0.001, job.deadline - job.created) end
  local x = (now - job.created + s) / span
  if x >= 1 then return -1e9 - (x - 1) * span end
  return s * weight * (1 - x * x)
end

-- Backpressure. A decode node says how much received state it can keep; a prefill for it is begun
-- only when its state fits beside what is promised to others, or nothing is promised at all.
local function room(queue)
  if queue ~= 'prefill' then return function() return true end end
  local nodes = {}
  return function(job)
    local node = nodes[job.node]
    if node == nil then
      local budget = redis.call('HMGET', 'tandem:budget:' .. job.node, 'limit', 'fixed', 'per_token')
      node = false
      if budget[1] then
        node = {limit = tonumber(budget[1]), fixed = tonumber(budget[2]), per_token = tonumber(budget[3]), held = 0}
        local held = redis.call('ZRANGE', 'tandem:promised:' .. job.node, 0, -1, 'WITHSCORES')
        for i = 2, #held, 2 do node.held = node.held + tonumber(held[i]) end
      end
      nodes[job.node] = node
    end
    if not node then return true, 0 end
    local need = node.fixed + node.per_token * job.prompt
    return node.held == 0 or node.held + need <= node.limit, need
  end
end

-- The best waiting job of `queue` for `holder` and its key, or nil. Candidates: the smallest, the
-- first to be due, and each owner's smallest; among many others the best one is found so.
local function best(queue, holder, now, weights)
  local seen, found, least, per_second, fits = {}, nil, nil, rate(queue), room(queue)
  local function try(ids)
    for _, id in ipairs(ids) do
      local job = not seen[id] and facts(id, holder)
      if not job and not seen[id] then
        -- Its record is gone (somebody deleted keys): it must not stand in the way of others.
        for _, name in ipairs({'size:' .. queue, 'due:' .. queue}) do redis.call('ZREM', 'tandem:' .. name, id) end
        for owner, _ in pairs(weights) do redis.call('ZREM', 'tandem:owned:' .. queue .. ':' .. owner, id) end
      end
      seen[id] = true
      local may, need = false, 0
      if job then may, need = fits(job) end
      if may then
        job.need = need or 0
        local key = weigh(job, weights[job.owner] or 1, now, per_second)
        if not least or key < least then found, least = job, key end
      end
    end
  end
  try(redis.call('ZRANGE', 'tandem:due:' .. queue, 0, POLICY.window - 1))
  try(redis.call('ZRANGE', 'tandem:size:' .. queue, 0, POLICY.window - 1))
  for owner, _ in pairs(weights) do
    try(redis.call('ZRANGE', 'tandem:owned:' .. queue .. ':' .. owner, 0, 1))
  end
  return found, least
end

local function used_by(queue, owner, now)
  local amount, at = unpack(redis.call('HMGET', 'tandem:used:' .. queue, owner, owner .. '@'))
  return tonumber(amount or '0') * 0.5 ^ ((now - tonumber(at or now)) / HALF)
end

local function charge(queue, owner, tokens, now)
  local key = 'tandem:used:' .. queue
  redis.call('HSET', key, owner, used_by(queue, owner, now) + tokens, owner .. '@', stamp(now))
  redis.call('EXPIRE', key, 20 * HALF)
end

-- Owner weights of those who wait in `queue`, and of `running` where given.
local function owner_weights(queue, now, running)
  local owners = redis.call('SRANDMEMBER', 'tandem:owners:' .. queue, 64)
  if running then owners[#owners + 1] = running end
  local used, total, n, weights = {}, 0, 0, {}
  for _, owner in ipairs(owners) do
    if not used[owner] then
      used[owner] = used_by(queue, owner, now)
      total, n = total + used[owner], n + 1
    end
  end
  for owner, amount in pairs(used) do
    weights[owner] = 1 + ((n > 1 and total > 0) and POLICY.share * n * amount / total or 0)
  end
  return weights
end

-- The indexes that give the pick its candidates. `index` and `unindex` are declared in lib.lua.
function index(id, queue)
  local job = facts(id)
  local due = job.deadline or job.created + POLICY.horizon * job.weight
  redis.call('ZADD', 'tandem:size:' .. queue, job.tokens * job.weight, id)
  redis.call('ZADD', 'tandem:due:' .. queue, stamp(due - job.tokens / rate(queue)), id)
  redis.call('ZADD', 'tandem:owned:' .. queue .. ':' .. job.owner, job.tokens * job.weight, id)
  redis.call('SADD', 'tandem:owners:' .. queue, job.owner)
end

function unindex(id, queue)
  local owner = redis.call('HGET', record(id), 'owner') or ''
  local owned = 'tandem:owned:' .. queue .. ':' .. owner
  redis.call('ZREM', 'tandem:size:' .. queue, id)
  redis.call('ZREM', 'tandem:due:' .. queue, id)
  redis.call('ZREM', owned, id)
  if redis.call('EXISTS', owned) == 0 then redis.call('SREM', 'tandem:owners:' .. queue, owner) end
end
