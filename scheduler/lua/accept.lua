-- Accept a job: record, prompt, first events, RQ job; or say why not. ARGV[2]: token ids.
-- Returns {outcome, detail}; for "accepted" the detail is the time.
local key = record(args.id)
local found = args.id
local status, digest, cancel = unpack(redis.call('HMGET', key, 'status', 'digest', 'cancel'))
if not status then
  -- Sent before, and given the job of an equal request.
  found = redis.call('GET', 'tandem:adopted:' .. args.id)
  if found then
    status, digest, cancel = unpack(redis.call('HMGET', record(found), 'status', 'digest', 'cancel'))
  end
end
if status then
  if args.digest ~= '' and digest ~= args.digest then return {'conflict', ''} end
  -- Whoever sends it again is there again, perhaps before it is known that they had gone.
  if args.adopt and not TERMINAL[status] and cancel ~= '1' then attend(found, args.client) end
  return {found == args.id and 'duplicate' or 'adopted', found}
end
if args.known then return {'gone', ''} end
if args.adopt and args.digest ~= '' then
  -- The same request as one whose client has gone: it goes on, for this client.
  local name = 'tandem:twin:' .. args.owner .. ':' .. args.digest
  local twin = redis.call('GET', name)
  if twin and redis.call('ZSCORE', 'tandem:abandoned', twin) and redis.call('EXISTS', record(twin)) == 1 then
    redis.call('DEL', name)
    redis.call('SET', 'tandem:adopted:' .. args.id, twin, 'EX', args.keep)
    attend(twin, args.client)
    return {'adopted', twin}
  end
end
if args.locked ~= '' then
  local holder = redis.call('GET', 'tandem:turn:' .. args.locked)
  if holder then
    local held = redis.call('HGET', record(holder), 'status')
    if held and not TERMINAL[held] then return {'busy', holder} end
  end
end
local home, lies = 'tandem:home:' .. args.conversation, false
if args.conversation ~= '' then
  lies = redis.call('HGET', home, 'node')
  if args.home and (lies or '') ~= args.home then return {'moved', ''} end
end
-- The past of a branch lies where it was found as long as its conversation has not moved.
if args.past ~= '' and args.past_home and
    (redis.call('HGET', 'tandem:home:' .. args.past, 'node') or '') ~= args.past_home then
  return {'moved', ''}
end
local paused = redis.call('GET', 'tandem:paused')
if paused then return {'paused', paused} end
if redis.call('LLEN', RQ .. ':queue:' .. args.queue) >= args.max_waiting then return {'full', ''} end
if args.owner_waiting > 0 then
  local waiting = 0
  for _, queue in ipairs(redis.call('SMEMBERS', RQ .. ':queues')) do
    local name = string.sub(queue, #RQ + 8)
    waiting = waiting + redis.call('ZCARD', 'tandem:owned:' .. name .. ':' .. args.owner)
  end
  if waiting >= args.owner_waiting then return {'owner full', ''} end
end
if args.theirs ~= '' then
  -- What an owner has, newest last; what is older than any record can be is forgotten.
  local mine = 'tandem:theirs:' .. args.theirs
  redis.call('ZADD', mine, stamp(NOW), args.id)
  redis.call('ZREMRANGEBYSCORE', mine, 0, stamp(NOW - args.keep - 30 * 86400))
end

redis.call('SET', 'tandem:prompt:' .. args.id, ARGV[2])
redis.call('HSET', key, unpack(args.fields))
redis.call('HSET', key, 'created_at', stamp(NOW), 'run', '', 'attempts', 0)
if args.adopt then attend(args.id, args.client) end
-- Tokens of this very prompt that a worker keeps from a run that was cancelled.
local holder, tokens = unpack(redis.call('HMGET', 'tandem:parked:' .. args.prompt, 'by', 'tokens'))
if holder then redis.call('HSET', key, 'parked_by', holder, 'parked_tokens', tokens) end
if args.deadline then redis.call('HSET', key, 'deadline', stamp(NOW + args.deadline)) end
if args.locked ~= '' then
  redis.call('HSET', key, 'locked', args.locked)
  redis.call('SET', 'tandem:turn:' .. args.locked, args.id)
end
if args.conversation ~= '' then
  redis.call('SADD', 'tandem:at:' .. args.conversation, args.id)
  if args.home or lies then
    redis.call('HSET', home, 'node', args.node)
    redis.call('HINCRBY', home, 'n', 1)
    redis.call('EXPIRE', home, args.keep_home)
  end
end
-- Its turn will keep the turns that it goes on from; until it is stored, this does.
if args.past ~= '' then redis.call('SADD', 'tandem:at:' .. args.past, args.id) end
move(args.id, nil, 'queued')
append(args.id, args.events)
enqueue(args.id, args.stage, args.queue, args.shadow)
return {'accepted', stamp(NOW)}
