import torch, torch.distributed as dist, itertools
from datetime import timedelta
from tests.support.distributed import run_distributed
from zeco_train.collectives.wire import Wire
from zeco_train.ops.softmax.span import Span
from zeco_train.ops.softmax.sdpa import attend, attend_backward
from zeco_train.sp.attention.all_gather import AllGather
from zeco_train.sp.attention.ulysses import Ulysses
def naive(q,k,v,span,scale):
    r=q.shape[2]//k.shape[2]
    k,v=(x.repeat_interleave(r,2) for x in (k,v))
    s=torch.einsum("bihd,bjhd->bhij",q,k)*scale
    s=s.masked_fill(~span.visible(0,k.shape[1],q.device),-torch.inf)
    return torch.einsum("bhij,bjhd->bihd",s.softmax(-1),v)
def suite(rank,size):
    wire=Wire(dist.group.WORLD,"attention",False,timedelta(seconds=30)); worst=0
    for T,heads,keys,win,docs in itertools.product((12*size,37),(4,),(4,2,1),(None,5,30),(None,(0,5,7,20,30),(0,1,2,3))):
        g=torch.Generator().manual_seed(T)
        B=1 if docs else 2
        q,do=(torch.randn(B,T,heads,8,dtype=torch.float64,generator=g) for _ in range(2)); k,v=(torch.randn(B,T,keys,8,dtype=torch.float64,generator=g) for _ in range(2))
        borders=torch.tensor([*docs,T]) if docs else None
        whole=Span(0,T,borders,win)
        leaves=[x.clone().requires_grad_() for x in (q,k,v)]
        y=naive(*leaves,whole,0.3); y.backward(do)
        a,b=T*rank//size,T*(rank+1)//size; own=whole.part(a,b)
        ms={"paired":AllGather(wire),"plain":AllGather(wire,paired=False)}
        if heads%size==0: ms["ulysses"]=Ulysses(wire)
        for name,m in ms.items():
            cut=[x[:,a:b].contiguous() for x in (q,k,v)]
            f=m.forward(*cut,own,T,0.3)
            gr=m.backward(do[:,a:b].contiguous(),*cut,f,own,T,0.3)
            for x,z in zip((f.o,*gr),(y.detach(),*(l.grad for l in leaves))):
                e=float((x-z[:,a:b]).abs().max()); worst=max(worst,e)
                assert e<1e-12,(name,T,keys,win,docs,e)
    return worst
if __name__=="__main__":
    for n in (1,2,3,4): print(n,run_distributed(suite,n))
