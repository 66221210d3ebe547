-- Accept a job: record, prompt, first events, RQ job; or say why not. ARGV[2]: token ids.
local key = record(args.id)
local status, digest = unpack(redis.call('HMGET', key, 'status', 'digest'))
if status then
  if args.digest ~= '' and digest ~= args.digest then return {'conflict', ''} end
  return {'duplicate', ''}
end
if args.locked ~= '' then
  local holder = redis.call('GET', 'tandem:turn:' .. args.locked)
  if holder then
    local held = redis.call('HGET', record(holder), 'status')
    if held and not TERMINAL[held] then return {'busy', holder} end
  end
end
if redis.call('LLEN', RQ .. ':queue:' .. args.queue) >= args.max_waiting then return {'full', ''} end

redis.call('SET', 'tandem:prompt:' .. args.id, ARGV[2])
redis.call('HSET', key, unpack(args.fields))
redis.call('HSET', key, 'created_at', stamp(NOW), 'run', '', 'attempts', 0)
if args.deadline then redis.call('HSET', key, 'deadline', stamp(NOW + args.deadline)) end
if args.locked ~= '' then
  redis.call('HSET', key, 'locked', args.locked)
  redis.call('SET', 'tandem:turn:' .. args.locked, args.id)
end
move(args.id, nil, 'queued')
append(args.id, args.events)
enqueue(args.id, args.stage, args.queue, args.shadow)
return {'accepted', ''}
