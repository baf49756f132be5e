"""``trtmodel``, also ``kubectl trtmodel``: what a person asks of a cluster, and of a model without one.

    dispatch     one entry for all commands; loads what the command needs and nothing else
    parser, run  the commands that speak with a cluster
    connection   the API server, by kubeconfig
    look         a TRTModel as a tree of lines (pure)
    outcome      has it ended, and how (pure)
    advice       every reason, what it means and what to do
    lint         a manifest against the definition: schema, rules

It reads status and writes one annotation, as anybody could with kubectl: the operator does not know that it exists.
"""
