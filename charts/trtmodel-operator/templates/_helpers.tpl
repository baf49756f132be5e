{{/* At most 48 characters: names with a suffix are made of it. A Service's name has no dots and begins with a letter. */}}
{{- define "operator.name" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $long := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) -}}
{{- $name = $long | replace "." "-" | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "no Service may be called %s-metrics: set fullnameOverride to a name that begins with a letter" $name) -}}
{{- end -}}
{{ $name }}
{{- end -}}

{{/* What no schema can refuse, with the way out. Where `lookup` sees no cluster (helm template) it finds nothing. */}}
{{- define "operator.checks" -}}
{{- if eq (int .Values.ports.probes) (int .Values.ports.metrics) -}}
{{- fail (printf "ports.probes and ports.metrics are both %v: give them two ports" .Values.ports.probes) -}}
{{- end -}}
{{- $name := include "operator.name" . -}}
{{- if .Release.IsUpgrade -}}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $mine := and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) -}}
{{- if and $mine (ne .metadata.name $name) (not (and $.Values.keySecret $.Values.leaseName)) -}}
{{- fail (printf "the operator of this release is called %s, now it would be %s, with another key pair and Lease: take fullnameOverride back, or keep both by keySecret=<the Secret's name, such as %s-signing> and leaseName=<the Lease's, such as %s>" .metadata.name $name .metadata.name .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rbac.create .Values.replicas -}}
{{- if .Values.watchNamespaces -}}
{{- range .Values.watchNamespaces -}}
{{- include "operator.alone" (list $ (lookup "rbac.authorization.k8s.io/v1" "RoleBinding" . "")) -}}
{{- end -}}
{{- else -}}
{{- include "operator.alone" (list . (lookup "rbac.authorization.k8s.io/v1" "RoleBinding" "" "")) -}}
{{- end -}}
{{- /* Who makes ClusterRoles may look at their bindings; who has rights in some namespaces alone may not. */}}
{{- if or .Values.rbac.aggregate (not .Values.watchNamespaces) -}}
{{- include "operator.alone" (list . (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses where one of these bindings gives an operator of another release what this one would look after: two would
take turns in writing the same objects, each with its own key. (list . bindings) */}}
{{- define "operator.alone" -}}
{{- $root := index . 0 -}}
{{- range (index . 1).items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $account := first (.subjects | default (list dict)) -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- $same := and (eq $release $root.Release.Name) (eq (get $account "namespace") $root.Release.Namespace) -}}
{{- $operates := and (eq (get $labels "app.kubernetes.io/name") $root.Chart.Name) (not (hasSuffix "-own" .metadata.name)) -}}
{{- if and $operates (not $same) -}}
{{- $what := "of all namespaces" -}}
{{- with .metadata.namespace }}{{ $what = printf "of the namespace %s" . }}{{ end -}}
{{- fail (printf "the release %s in the namespace %s looks after TRTModels %s already, and two operators would undo each other's work: uninstall it first (models stay and serve on), or give both releases namespaces of their own by watchNamespaces" $release (get $account "namespace") $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "operator.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "operator.name" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{- define "operator.keySecret" -}}
{{ .Values.keySecret | default (printf "%s-signing" (include "operator.name" .)) }}
{{- end -}}

{{- define "operator.lease" -}}
{{ .Values.leaseName | default (include "operator.name" .) }}
{{- end -}}

{{- define "operator.priorityClass" -}}
{{- with .Values.builds.priorityClass -}}
{{ .name | default (ternary (printf "%s-builds" (include "operator.name" $)) "" .create) }}
{{- end -}}
{{- end -}}

{{- define "operator.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "operator.own" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of an object: ours, and those of the values that do not replace ours. */}}
{{- define "operator.labels" -}}
{{ toYaml (merge (include "operator.own" . | fromYaml) (.Values.commonLabels | default dict)) }}
{{- end -}}

{{/* The same with labels for this object: (list . labels). */}}
{{- define "operator.labelsWith" -}}
{{- $root := first . -}}
{{ toYaml (merge (include "operator.own" $root | fromYaml) (last . | default dict) ($root.Values.commonLabels | default dict)) }}
{{- end -}}

{{/* Who may read metrics. */}}
{{- define "operator.metricsFrom" -}}
{{- if .Values.networkPolicy.metricsFrom -}}
{{ toYaml .Values.networkPolicy.metricsFrom }}
{{- else -}}
- namespaceSelector: {}
{{- end -}}
{{- end -}}

{{/* The operator's own pods, as a peer of pods in other namespaces. */}}
{{- define "operator.peer" -}}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ .Release.Namespace }}}
  podSelector:
    matchLabels: {{- include "operator.selector" . | nindent 6 }}
{{- end -}}

{{- define "operator.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "operator.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "operator.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A constraint that says nothing of whom it is about is about the operator's pods. */}}
{{- define "operator.spread" -}}
{{- $mine := dict "labelSelector" (dict "matchLabels" (include "operator.selector" . | fromYaml)) -}}
{{- $default := list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway") -}}
{{- $all := list -}}
{{- range .Values.topologySpreadConstraints | default $default -}}
{{- if not (hasKey . "labelSelector") }}{{ $_ := set . "labelSelector" (get $mine "labelSelector") }}{{ end -}}
{{- $all = append $all . -}}
{{- end -}}
{{ toYaml $all }}
{{- end -}}

{{/* What the operator may do where its models are: no Secrets, since Jobs and workers mount them by name and it reads
none. Each verb is a call in operator/trtmodel_operator/adapters; a test compares both lists. */}}
{{- define "operator.rules" -}}
- apiGroups: [trtmodel.io]
  resources: [trtmodels]
  verbs:
  - get  # a pass over a model that is not among those that are kept: it went, or came just now
  - list  # the resync, and the informer's start
  - watch  # the informer
  {{- if .Values.rbac.deleteArtifacts }}
  - patch  # the finalizer of those whose deletionPolicy is Delete, by server-side apply, and nothing else
  {{- end }}
- apiGroups: [trtmodel.io]
  resources: [trtmodels/status]
  verbs:
  - patch  # memory and conditions, by server-side apply
- apiGroups: [trtmodel.io]
  resources: [trtmodels/finalizers]
  verbs:
  - update  # children name their owner with blockOwnerDeletion, which OwnerReferencesPermissionEnforcement guards
- apiGroups: [batch]
  resources: [jobs]
  verbs:
  - get  # before a build of another model is joined or left
  - list  # children of a model; builds that wait for their turn
  - watch  # the informer: a Job that ended
  - create  # resolve, build and collect
  - patch  # a build's turn (suspend), and its further owners
  - delete  # a Job that nobody waits for any more
- apiGroups: [apps]
  resources: [deployments]
  verbs:
  - list  # children of a model
  - watch  # the informer
  - create  # the workers of a target, by server-side apply, which asks for both
  - patch  # and their number alone, by a merge
  - delete  # a target that the spec names no more
- apiGroups: [""]
  resources: [services]
  verbs:
  - list  # children of a model
  - watch  # the informer
  - create  # before the workers, by server-side apply
  - patch
- apiGroups: [""]
  resources: [configmaps]
  verbs:
  - list  # children of a model; only those with the operator's label are asked for
  - watch  # the informer
  - create  # boot pointers and public keys, by server-side apply
  - patch
  - delete  # the pointer of a target that the spec names no more
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs:
  - create  # of workers, by server-side apply
  - patch
- apiGroups: [""]
  resources: [pods]
  verbs:
  - list  # workers to ask, and what Jobs said at their end
  - watch  # the informer: a worker that came or went
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs:
  - list  # why no pod of a Job can be made
  - create  # what people see with kubectl describe
  - patch  # how often it was told, where it is told again soon
{{- end -}}
