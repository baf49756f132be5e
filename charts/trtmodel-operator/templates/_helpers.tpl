{{/* At most 48 characters: names with a suffix are made of it. */}}
{{- define "operator.name" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" }}
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

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* What the operator may do where its models are. No Secrets: Jobs and workers mount them by name, it reads none. */}}
{{- define "operator.rules" -}}
- apiGroups: [trtmodel.io]
  resources: [trtmodels]
  verbs: [get, list, watch]
- apiGroups: [trtmodel.io]
  resources: [trtmodels/status]
  verbs: [get, update, patch]
# Where OwnerReferencesPermissionEnforcement is on, owning a child takes this; the operator sets no finalizer.
- apiGroups: [trtmodel.io]
  resources: [trtmodels/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
