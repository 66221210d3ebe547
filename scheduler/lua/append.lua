-- Append events of runs: args.rows of {id, run, first, events, tokens}. first: number of the row's
-- first event, as its writer counts. All rows are told of in one message.
-- Returns for each row {ok | lost | done | behind, count of events}, packed: one value is read
-- sooner than many.
local live = {}

local function add(row)
  local key = record(row.id)
  -- One look at the record: this runs for every row of every decode step.
  local status, run, seq, told = unpack(redis.call('HMGET', key, 'status', 'run', 'seq', 't_first_token'))
  seq = tonumber(seq or '0')
  if not status or run ~= row.run then return {'lost', seq} end
  if TERMINAL[status] then return {'done', seq} end
  if row.first > seq then return {'behind', seq} end
  local fresh = row.events
  if row.first < seq then
    fresh = {}
    for i = seq - row.first + 1, #row.events do fresh[#fresh + 1] = row.events[i] end
  end
  if #fresh > 0 then seq = append(row.id, fresh, live, seq) end
  if row.tokens then
    if not told then
      redis.call('HSET', key, 't_first_token', stamp(NOW))
      -- How fast this decode node extends a state by itself.
      local f = redis.call('HMGET', key, 'handoff', 'prompt_tokens', 'held_tokens', 't_prefilling', 'node', 'stage')
      local tokens = tonumber(f[2] or '0') - tonumber(f[3] or '0')
      if f[6] == 'decode' and not f[1] and f[4] and tokens >= 64 then
        learn('tandem:rate:extend:' .. f[5], tokens / math.max(0.001, NOW - tonumber(f[4])))
      end
    end
    -- Also from a prefill node, which may begin the answer.
    move(row.id, status, 'decoding')
  end
  return {'ok', seq}
end

local answers = {}
for i, row in ipairs(args.rows) do answers[i] = add(row) end
tell(live)
return cmsgpack.pack(answers)
