"""One model on several devices or machines, each with a pool of its own, behind one address: on Ray Serve.

    hfpaged serve MODEL --replicas 2                    on this machine
    hfpaged serve MODEL --replicas 2 --address auto     on a Ray cluster that is there already

An *ingress* takes the requests and has no model; it hands each to a *replica*, which loads the model and answers with
the application of hfpaged.serve. Importing this loads neither Ray nor torch.
"""
