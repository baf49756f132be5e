"""gRPC for the worker: a process of its own that turns every call into a request of the front's HTTP protocol.

It is an adapter only. What is valid, which revision answers, batching, limits and errors are the front's, so that both
protocols behave alike; and gRPC's interpreter time is not the front's, so that HTTP does not wait for it.
"""
