module trtmodel.io/cluster/pause

go 1.25.0
