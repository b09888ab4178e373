"""A training step of Qwen2.5 shapes with Hugging Face transformers and PyTorch: what bench/train/bench_step_cuda.cpp is measured
against. bf16 weights, fused AdamW, cuDNN attention, the loss in chunks, random weights.
  train_step_peers.py [SIZE:TOKENS[:layer][:compile][:loraR][:stepsN] ...]     all cases of docs/results/engine-cuda.md without arguments
loraR: adapters of rank R by PEFT on all linear layers, alpha 2R, dropout 0.05, the model itself frozen in bf16.
"""
import torch, time, sys, gc, json
from transformers import Qwen2Config, Qwen2ForCausalLM
from torch.nn.attention import sdpa_kernel, SDPBackend
import torch.nn.functional as F
torch.set_float32_matmul_precision('high')
CFG={'0.5B':dict(hidden_size=896,intermediate_size=4864,num_hidden_layers=24,num_attention_heads=14,num_key_value_heads=2,tie_word_embeddings=True,vocab_size=151936),
     '3B':dict(hidden_size=2048,intermediate_size=11008,num_hidden_layers=36,num_attention_heads=16,num_key_value_heads=2,tie_word_embeddings=True,vocab_size=151936),
     '7B':dict(hidden_size=3584,intermediate_size=18944,num_hidden_layers=28,num_attention_heads=28,num_key_value_heads=4,tie_word_embeddings=False,vocab_size=152064)}
def nparam(m): return sum(p.numel() for p in m.parameters())
def chunked_ce(h, w, labels, chunk=4096):
    # fused linear+CE by chunk with recompute
    from torch.utils.checkpoint import checkpoint
    tot=0.
    def f(hc,lc): return F.cross_entropy((hc@w.t()).float(), lc, reduction='sum')
    for i in range(0,h.shape[0],chunk):
        tot=tot+checkpoint(f,h[i:i+chunk],labels[i:i+chunk],use_reentrant=False)
    return tot/h.shape[0]
def with_adapters(m,rank):
    from peft import LoraConfig, get_peft_model
    lora=LoraConfig(r=rank,lora_alpha=2*rank,lora_dropout=0.05,target_modules='all-linear',task_type='CAUSAL_LM')
    m.enable_input_require_grads()  # checkpoints of a frozen embedding's output would have no gradient
    return get_peft_model(m,lora)
def run(size,S,ckpt,comp,steps=4,rank=0):
    torch.manual_seed(0)
    cfg=Qwen2Config(**CFG[size],max_position_embeddings=S,rope_theta=1e6,use_cache=False,attn_implementation='sdpa')
    with torch.device('cuda'):
        m=Qwen2ForCausalLM(cfg).to(torch.bfloat16)
    m.train()
    if ckpt: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant':False})
    peft=with_adapters(m,rank) if rank else None
    opt=torch.optim.AdamW([p for p in m.parameters() if p.requires_grad],lr=1e-5,fused=True)
    body=m.model
    if comp: body=torch.compile(body)
    ids=torch.randint(0,150000,(1,S+1),device='cuda')
    ts=[]; torch.cuda.reset_peak_memory_stats()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION,SDPBackend.FLASH_ATTENTION],set_priority=True):
        for it in range(steps):
            torch.cuda.synchronize(); t=time.time()
            h=body(input_ids=ids[:,:-1]).last_hidden_state
            loss=chunked_ce(h[0],m.lm_head.weight,ids[0,1:])
            loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
            torch.cuda.synchronize(); ts.append(time.time()-t)
    t=min(ts[1:] or ts); L=cfg.num_hidden_layers; N=nparam(m)
    fl=(4 if rank else 6)*N*S + 12*L*cfg.hidden_size*S*S/2  # causal attention 3.0x convention (fwd 2*2*S^2*h/2 *3)
    print(json.dumps(dict(size=size,S=S,lora=rank,ckpt=ckpt,compile=comp,step_s=round(t,3),tok_s=round(S/t),mfu=round(fl/t/989e12,3),peakGB=round(torch.cuda.max_memory_allocated()/2**30,1),loss=round(loss.item(),3))),flush=True)
    del m,peft,opt,body; gc.collect(); torch.cuda.empty_cache(); torch._dynamo.reset()
ALL = ['0.5B:8192', '0.5B:32768', '0.5B:131072:layer', '3B:8192', '3B:32768:layer', '3B:131072:layer']
for case in sys.argv[1:] or ALL:
    size, tokens, *options = case.split(':')
    steps = [int(option[5:]) for option in options if option.startswith('steps')] or [4]  # the first of several warms up
    rank = [int(option[4:]) for option in options if option.startswith('lora')] or [0]
    try: run(size, int(tokens), 'layer' in options, 'compile' in options, steps[0], rank[0])
    except Exception as e: print(case,'ERR',str(e)[:200],flush=True); gc.collect(); torch.cuda.empty_cache()
