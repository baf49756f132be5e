-- Argo CD's health of a TRTModel. It goes into the ConfigMap argocd-cm: see health.yaml, which holds the same text.
-- Progressing until the operator has seen this generation; Degraded where it ended without it; Suspended where it waits
-- for a person; Healthy when the newest revision serves.
local hs = { status = "Progressing", message = "waiting for the operator" }
if obj.status == nil or obj.status.conditions == nil then
  return hs
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  hs.message = "the newest spec was not looked at yet"
  return hs
end
local found = {}
for _, condition in ipairs(obj.status.conditions) do
  found[condition.type] = condition
end
local ready, stalled, progressing = found["Ready"], found["Stalled"], found["Progressing"]
if stalled ~= nil and stalled.status == "True" then
  hs.status = "Degraded"
  hs.message = stalled.reason .. ": " .. stalled.message
elseif ready ~= nil and ready.status == "True" then
  hs.status = "Healthy"
  hs.message = ready.message
elseif progressing ~= nil and progressing.status == "False" and
    (progressing.reason == "Paused" or progressing.reason == "StepPaused" or progressing.reason == "AwaitingPromotion"
     or progressing.reason == "ScaledToZero") then
  hs.status = "Suspended"
  hs.message = progressing.message
elseif ready ~= nil then
  hs.message = ready.reason .. ": " .. ready.message
end
return hs
