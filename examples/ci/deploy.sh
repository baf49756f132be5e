#!/bin/sh
# Applies a manifest and waits until the model serves, or until it is known that it will not. For any CI system: it needs
# kubectl, the plugin (pip install '.[cli]') and a kubeconfig.
#
#   deploy.sh <manifest> <name> <namespace> [time, default 30m]
#
# The exit code is that of `trtmodel status --timeout`: 0 it serves; 3 gate failed or rolled back (the old revision serves
# on); 4 it waits for a person, so the pipeline goes on to its manual stage; 124 the time is over.
set -eu
manifest=$1 name=$2 namespace=$3 time=${4:-30m}

trtmodel lint "$manifest"
kubectl apply --namespace "$namespace" --filename "$manifest"

code=0
trtmodel status "$name" --namespace "$namespace" --timeout "$time" || code=$?
if [ "$code" -ne 0 ]; then
  trtmodel explain "$name" --namespace "$namespace" || true
  trtmodel history "$name" --namespace "$namespace" || true
fi
exit "$code"
