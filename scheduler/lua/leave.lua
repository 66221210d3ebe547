-- A node's process ends: its entry goes, unless a successor has taken the name already.
-- An entry is packed as its readers want it; what a boot is called stands in it as it is.
local entry = redis.call('GET', args.key)
if entry and string.find(entry, args.boot, 1, true) then return redis.call('DEL', args.key) end
return 0
