-- Limits counted in Redis for several gateways, as MemoryStore does for one. Needs Redis 6.
--
-- KEYS: the clock; then, in the order of processing, the slots and buckets of each entry.
-- ARGV[1], MessagePack: {burst_s, lease_s, releases, renewals, decisions}
--   release   {lease, number of slots, {cost_s of each bucket}}
--   renewal   {lease, number of slots}
--   decision  {lease, {limit of each slot}, {cost_s of each bucket}}
-- Returns, MessagePack: for each decision {admitted, each slot's busy, each bucket's debt_s}.
--
-- A bucket is stored as the time at which it will be full, and expires then. A slot is a member of a
-- sorted set whose score is the end of its lease. A key with a value that no gateway stores counts as
-- missing and is replaced: it is a fault of that key alone.

local EPSILON_S = 1e-7
-- Seconds since 2026 leave a double a resolution of 10 ns; since 1970, too coarse for one token.
local EPOCH = 1767225600
local CLOCK_MS = 86400000
-- Margin of expiry: an expired bucket must be full.
local SPARE_MS = 1

-- Above any debt that a request can make: 10^13 tokens at one a minute are 6 * 10^14 s.
local MAX_DEBT_S = 1e15
-- Redis refuses times that `number` would write with an exponent.
local MAX_EXPIRY_MS = 1e15

local number = function(value) return string.format('%.17g', value) end

-- If the server's clock is set back, time continues from where it was, so no key is locked out.
local time = redis.call('TIME')
local wall, ahead = tonumber(time[1]) - EPOCH + tonumber(time[2]) / 1e6, 0
-- Returns 0 for what is no number, or further away than MAX_DEBT_S: also infinite and NaN.
local bounded = function(value)
  return value and value >= -MAX_DEBT_S and value <= MAX_DEBT_S and value or 0
end

local get = function(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or ''
end

local last_wall, last_ahead = string.match(get(KEYS[1]), '^(%S+) (%S+)$')
if last_wall then
  local back = (tonumber(last_wall) or wall) - wall
  ahead = bounded(tonumber(last_ahead)) + math.max(0, bounded(back))
end
redis.call('SET', KEYS[1], number(wall) .. ' ' .. number(ahead), 'PX', CLOCK_MS)
local now = wall + ahead

local burst_s, lease_s, releases, renewals, decisions = unpack(cmsgpack.unpack(ARGV[1]))
local cursor = 1

local next_keys = function(count)
  local keys = {}
  for i = 1, count do keys[i] = KEYS[cursor + i] end
  cursor = cursor + count
  return keys
end

local debt_of = function(key)
  local full_at = tonumber(get(key))
  return full_at and math.max(0, bounded(full_at - now)) or 0
end

-- Runs a command on a slot.
local on_slot = function(command, key, ...)
  local result = redis.pcall(command, key, ...)
  if type(result) == 'table' and result.err then
    redis.call('DEL', key)
    result = redis.call(command, key, ...)
  end
  return result
end

-- Returns how many leases hold a slot. Of a full one, those are dropped that end later than any
-- gateway's, also at no time: nothing else would ever end them.
local busy_of = function(key, limit)
  on_slot('ZREMRANGEBYSCORE', key, '-inf', number(now))
  local busy = redis.call('ZCARD', key)
  if busy >= limit and redis.call('ZREMRANGEBYSCORE', key, number(now + 10 * lease_s), '+inf') > 0 then
    return redis.call('ZCARD', key)
  end
  return busy
end

local owe = function(key, debt)
  if debt > 0 then
    local expiry_ms = math.min(math.ceil(debt * 1000) + SPARE_MS, MAX_EXPIRY_MS)
    redis.call('SET', key, number(now + debt), 'PX', number(expiry_ms))
  else
    redis.call('DEL', key)
  end
end

local passes = function(debt, cost)
  if cost == 0 then return true end
  return cost < math.huge and debt - math.max(0, burst_s - cost) <= EPSILON_S
end

local hold = function(slots, lease)
  for _, key in ipairs(slots) do
    on_slot('ZADD', key, number(now + lease_s), lease)
    redis.call('PEXPIRE', key, number(math.ceil(lease_s * 1000) + SPARE_MS))
  end
end

for _, release in ipairs(releases) do
  local lease, slots, costs = unpack(release)
  for _, key in ipairs(next_keys(slots)) do on_slot('ZREM', key, lease) end
  for i, key in ipairs(next_keys(#costs)) do
    if costs[i] ~= 0 then owe(key, debt_of(key) + costs[i]) end
  end
end

-- Before the decisions: a server that lost a lease must not give its slot away.
for _, renewal in ipairs(renewals) do
  local lease, slots = unpack(renewal)
  hold(next_keys(slots), lease)
end

local answers = {}
for d, decision in ipairs(decisions) do
  local lease, limits, costs = unpack(decision)
  local slots, buckets = next_keys(#limits), next_keys(#costs)
  local busy, debts, admitted = {}, {}, true
  for i, key in ipairs(slots) do
    busy[i] = busy_of(key, limits[i])
    admitted = admitted and busy[i] < limits[i]
  end
  for i, key in ipairs(buckets) do
    debts[i] = debt_of(key)
    admitted = admitted and passes(debts[i], costs[i])
  end
  if admitted then
    hold(slots, lease)
    for i, key in ipairs(buckets) do
      if costs[i] ~= 0 then
        debts[i] = debts[i] + costs[i]
        owe(key, debts[i])
      end
    end
  end
  local answer = {admitted}
  for i = 1, #slots do answer[#answer + 1] = busy[i] + (admitted and 1 or 0) end
  for i = 1, #buckets do answer[#answer + 1] = debts[i] end
  answers[d] = answer
end

return cmsgpack.pack(answers)
