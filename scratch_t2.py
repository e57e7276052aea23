import torch, torch.distributed as dist, torch.nn.functional as F, sys, copy
from torch.distributed.device_mesh import init_device_mesh
import hp_compile
from tests.dist_pool import run_ranks
import torch.nn as nn
class Blk(nn.Module):
    def __init__(s,d):
        super().__init__(); s.l1=nn.Linear(d,4*d); s.l2=nn.Linear(4*d,d); s.n=nn.LayerNorm(d)
    def forward(s,x): return x+s.l2(F.gelu(s.l1(s.n(x))))
class M(nn.Module):
    def __init__(s,d=16,v=37):
        super().__init__(); s.emb=nn.Embedding(v,d); s.layers=nn.ModuleList(Blk(d) for _ in range(2)); s.head=nn.Linear(d,v,bias=False)
    def forward(s,t):
        h=s.emb(t)
        for l in s.layers: h=l(h)
        return s.head(h)
def case(rank, world, backend):
    out=[]
    for name,shape,names,kw,mode in [
      ("fsdp",(4,),("dp_shard",),{},"plain"),
      ("hsdp",(2,2),("dp_replicate","dp_shard"),{},"plain"),
      ("ddp",(4,1),("dp_replicate","dp_shard"),{},"plain"),
      ("int2",(4,),("dp_shard",),dict(reshard_after_forward=2),"plain"),
      ("raf F",(4,),("dp_shard",),dict(reshard_after_forward=False),"plain"),
      ("nosync",(2,2),("dp_replicate","dp_shard"),{},"nosync"),
      ("noar",(2,2),("dp_replicate","dp_shard"),{},"noar"),
      ("zero2",(2,2),("dp_replicate","dp_shard"),"z2","zero2"),
      ("two shard",(2,2),("dp_shard","cp"),dict(roles={"shard":("dp_shard","cp")}),"plain"),
      ("bf16",(4,),("dp_shard",),dict(mp_policy=hp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16,reduce_dtype=torch.float32)),"plain"),
      ("shard1",(4,),("dp_shard",),dict(shard_placement_fn=lambda p: __import__("torch").distributed.tensor.Shard(1) if p.ndim>1 else None),"plain"),
      ("noshard",(2,2),("dp_replicate","dp_shard"),dict(enable_param_shard=False),"plain"),
    ]:
        torch.manual_seed(0)
        m=M(); ref=copy.deepcopy(m)
        mesh=init_device_mesh("cpu",shape,mesh_dim_names=names)
        pol=hp_compile.Policy.zero(2,backend=backend) if kw=="z2" else hp_compile.Policy(backend=backend,**kw)
        m=hp_compile.shard(m,mesh,pol)
        n=1 if mode=="plain" else 3
        for i in range(n):
            g=torch.Generator().manual_seed(rank+10*i)
            t=torch.randint(0,37,(4,8),generator=g); y=torch.randint(0,37,(4,8),generator=g)
            last=i==n-1
            if mode=="nosync": m.set_requires_gradient_sync(last)
            if mode=="noar": m.set_requires_all_reduce(last)
            if mode=="zero2": m.set_is_last_backward(last)
            loss=F.cross_entropy(m(t).flatten(0,1).float(),y.flatten()); loss.backward()
            l2=F.cross_entropy(ref(t).flatten(0,1),y.flatten()); l2.backward()
            if mode in("nosync","noar") and not last: assert all(p.grad is None for p in m.parameters())
        d=0
        for (nn_,p),q in zip(m.named_parameters(),ref.parameters()):
            gg=q.grad.clone(); dist.all_reduce(gg); gg/=world
            d=max(d,(p.grad.full_tensor()-gg).abs().max().item())
        pl=m.plan(t)
        out.append((name,d,abs(loss-l2).item(),len(pl.collectives)))
        if rank==0: print(out[-1],flush=True)
        if rank==0 and name=="hsdp": print(pl.dump(),flush=True)
    return out
if __name__=="__main__":
    for o in run_ranks(case,4,sys.argv[1],timeout=300)[0]: print(o)
