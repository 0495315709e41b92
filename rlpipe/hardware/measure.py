from rlpipe.plan.device import Device
def own_device(device):
    return Device(name="x",memory_bytes=8<<30,matmul_flops={"float32":1e11,"bfloat16":1e11,"float16":1e11},memory_bandwidth=1e10,host_to_device=5e9,device_to_host=5e9,both=3e9,link=1e9,device_adam=1e9,host_adam=1e8,host_memory_bytes=24<<30)
