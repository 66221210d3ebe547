-- Clients that wait, or still do, for live foreground jobs. args.clients: list of {job, client}.
for _, entry in ipairs(args.clients) do
  local id, client = unpack(entry)
  local status, cancel, background = unpack(redis.call('HMGET', record(id), 'status', 'cancel', 'background'))
  if status and not TERMINAL[status] and cancel ~= '1' and background ~= '1' then attend(id, client) end
end
