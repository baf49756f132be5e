# make cluster-up       start or heal the local cluster
# make cluster-down     stop it, keep its state
# make cluster-purge    stop it and delete everything but the cache
# make cluster-status   what runs and answers
# make cluster-images   build the product's images and load them
CLUSTER_TOOL := tests/cluster/cluster

.PHONY: cluster-up cluster-down cluster-purge cluster-status cluster-images

cluster-up:
	$(CLUSTER_TOOL) up

cluster-down:
	$(CLUSTER_TOOL) down

cluster-purge:
	$(CLUSTER_TOOL) down --purge

cluster-status:
	$(CLUSTER_TOOL) status

cluster-images:
	$(CLUSTER_TOOL) images
