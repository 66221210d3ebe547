-- Append events of runs. ARGV[2]: packed list of {id, number of the first event as its writer
-- counts, events}, which is at the same time what is told when all of it is new. args.runs and
-- args.tokens: each row's run, and whether it has token ids.
-- Returns the rows that did not go as their writer expected, packed, of {place from 0, ok | lost |
-- done | behind, count of events}; empty where all did: nothing is read sooner than something.
local call = redis.call
local rows = cmsgpack.unpack(ARGV[2])
local runs, with_tokens = args.runs, args.tokens
local live, odd  -- from the first row on that is not like most

-- A row whose run is lost, that begins an answer, or whose events are there in part.
local function look(i, status, run, seq, told)
  local id, first, events = unpack(rows[i])
  if not status or run ~= runs[i] then return 'lost', seq end
  if TERMINAL[status] then return 'done', seq end
  if first > seq then return 'behind', seq end
  local fresh = events
  if first < seq then
    fresh = {}
    for k = seq - first + 1, #events do fresh[#fresh + 1] = events[k] end
  end
  if #fresh > 0 then seq = append(id, fresh, live, seq) end
  if with_tokens[i] then
    if not told then
      local key = record(id)
      call('HSET', key, 't_first_token', stamp(NOW))
      -- How fast this decode node extends a state by itself.
      local f = call('HMGET', key, 'handoff', 'prompt_tokens', 'held_tokens', 't_prefilling', 'node', 'stage')
      local tokens = tonumber(f[2] or '0') - tonumber(f[3] or '0')
      if f[6] == 'decode' and not f[1] and f[4] and tokens >= 64 then
        learn('tandem:rate:extend:' .. f[5], tokens / math.max(0.001, NOW - tonumber(f[4])))
      end
    end
    -- Also from a prefill node, which may begin the answer.
    move(id, status, 'decoding')
  end
  return 'ok', seq
end

-- This runs for every row of every decode step: what most rows need is written out.
for i = 1, #rows do
  local row = rows[i]
  local id, first, events = row[1], row[2], row[3]
  local key = 'tandem:job:' .. id
  local f = call('HMGET', key, 'status', 'run', 'seq', 't_first_token')
  local seq = tonumber(f[3] or '0')
  if f[1] == 'decoding' and f[2] == runs[i] and seq == first and f[4] and #events > 0 then
    local log = 'tandem:events:' .. id
    for k = 1, #events do
      seq = seq + 1
      call('XADD', log, seq .. '-0', 'e', events[k])
    end
    call('HSET', key, 'seq', seq)
    if live then live[#live + 1] = row end
  else
    if not live then
      live, odd = {}, {}
      for k = 1, i - 1 do live[k] = rows[k] end
    end
    local outcome, count = look(i, f[1], f[2], seq, f[4])
    if outcome ~= 'ok' or count ~= first + #events then odd[#odd + 1] = {i - 1, outcome, count} end
  end
end
if live then
  tell(live)
  return #odd > 0 and cmsgpack.pack(odd) or ''
end
if #rows > 0 then call('PUBLISH', 'tandem:live', ARGV[2]) end
return ''
