"""Less precision, written into the ONNX file: what any runtime can be given that reads Q/DQ nodes and casts.

keep        which nodes stay as they are: by name pattern, by operator
calibrate   ranges of activations from data, streamed
int8        Q/DQ around Conv, MatMul and Gemm
half        FP16 and BF16 by casts, for runtimes that compute in the type that the graph states
rounded     FP16 and BF16 as rounding, for accuracy as on a GPU where there is none
reduced     a graph any of whose nodes can be reduced or kept: for builders, and for who asks which node hurts
"""
