// One kernel per rule of docs/memory-model.md, kept or broken: VARIANT 0 keeps it, the others break it as RULES in
// gpu_memory_model.py says. A kernel checks its own data and adds to a tally. Compiled once per variant, for sm_90a, without
// headers. Every wait gives up after a while and counts as stuck, so that a broken rule costs a trial, not the GPU.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Tally {
    u64 checks, wrong, stuck;
};

#define ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads)
#define DEVICE static __device__ __forceinline__
#define IN_SHARED(p) ((u32)__cvta_generic_to_shared(p))

constexpr long long PATIENCE = 4000000;  // cycles, some two milliseconds

// What one thread checked; added to the tally when the thread is done.
struct Count {
    Tally* tally;
    u32 checked = 0, wrong = 0;
    __device__ explicit Count(Tally* t) : tally(t) {}
    __device__ void operator()(bool right) {
        checked++;
        wrong += !right;
    }
    __device__ ~Count() {
        atomicAdd(&tally->checks, checked);
        if (wrong) atomicAdd(&tally->wrong, wrong);
    }
};
DEVICE u32 value(u32 tag, u32 place) { return tag * 0x9E3779B1u + place; }
DEVICE void spin(u32 cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {}
}
DEVICE u32 read_global(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE u32 in_cta(u32 address, u32 cta) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
    return there;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- mbarriers and bulk copies

DEVICE void init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(IN_SHARED(bar)), "r"(count) : "memory");
}
DEVICE void publish_inits() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(IN_SHARED(bar)) : "memory");
}
DEVICE void arrive_at(u32 remote) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
}
DEVICE void expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(IN_SHARED(bar)), "r"(bytes) : "memory");
}
DEVICE bool complete(u64* bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(IN_SHARED(bar)), "r"(parity) : "memory");
    return done;
}
DEVICE bool wait(Tally* tally, u64* bar, u32 parity) {
    for (long long start = clock64(); clock64() - start < PATIENCE;)
        if (complete(bar, parity)) return true;
    atomicAdd(&tally->stuck, 1ull);
    return false;
}
DEVICE void load(void* to, const void* from, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(IN_SHARED(to)), "l"(from), "r"(bytes), "r"(IN_SHARED(bar)) : "memory");
}
DEVICE void load_to_both(void* to, const void* from, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :: "r"(IN_SHARED(to)), "l"(from), "r"(bytes), "r"(IN_SHARED(bar)), "h"((unsigned short)3) : "memory");
}
DEVICE void store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;"
                 :: "l"(to), "r"(IN_SHARED(from)), "r"(bytes) : "memory");
}
DEVICE void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- what the host starts with: data[i] = i

ENTRY(256) fill(u32* data, u32 words) {
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) data[i] = i;
}

// ---- generic writes, then the async proxy

constexpr u32 STAGE = 4096;  // words

ENTRY(128) proxy_fence_store(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 stage[STAGE];
    u32* mine = data + blockIdx.x * STAGE;
    for (u32 i = 0; i < 8; i++) {
        const u32 tag = round * 8 + i;
        const u32 writers = VARIANT == 2 ? 32 : 128;
        if (threadIdx.x < writers)
            for (u32 j = threadIdx.x; j < STAGE; j += writers) stage[j] = value(tag, j);
        if (VARIANT == 0) proxy_fence();
        if (VARIANT == 2) __syncwarp(); else __syncthreads();
        if (threadIdx.x == 0) {
            store(mine, stage, STAGE * 4);
            stores_done();
        }
        __syncthreads();
        for (u32 j = threadIdx.x; j < STAGE; j += 128) check(read_global(mine + j) == value(tag, j));
        __syncthreads();
    }
}

// ---- a ring of two stages

constexpr u32 SLOT = 8192;  // words

ENTRY(160) ring_release(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    extern __shared__ __align__(128) u32 ring[];
    __shared__ alignas(8) u64 full[2], empty[2];
    const u32 *source = data + (blockIdx.x % 8) * 16 * SLOT, chunks = 16;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) init(&full[s], 1), init(&empty[s], 128);
        publish_inits();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0)
            for (u32 c = 0; c < chunks; c++) {
                if (c >= 2 && !wait(tally, &empty[c % 2], (c / 2 + 1) % 2)) break;
                expect(&full[c % 2], SLOT * 4);
                load(ring + c % 2 * SLOT, source + c * SLOT, SLOT * 4, &full[c % 2]);
            }
    } else {
        for (u32 c = 0; c < chunks; c++) {
            if (!wait(tally, &full[c % 2], c / 2 % 2)) break;
            if (VARIANT) arrive(&empty[c % 2]);
            if (VARIANT == 2) spin(4000);
                const volatile u32* slot = ring + c % 2 * SLOT;
            for (u32 j = threadIdx.x - 32; j < SLOT; j += 128) check(slot[j] == (u32)(source - data) + c * SLOT + j);
            if (!VARIANT) arrive(&empty[c % 2]);
        }
    }
}

// ---- mbarrier: phase, bytes, initialization

ENTRY(128) mbarrier_phase(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 slot[2048];
    __shared__ alignas(8) u64 bar[16];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 16; i++) init(&bar[i], 1);
        publish_inits();
    }
    for (u32 i = 0; i < 16; i++) {
        for (u32 j = threadIdx.x; j < 2048; j += 128) slot[j] = ~0u;
        proxy_fence();
        __syncthreads();
        const u32 first = (blockIdx.x * 16 + i) * 2048;
        if (threadIdx.x == 0) {
            expect(&bar[i], 8192);
            load(slot, data + first, 8192, &bar[i]);
        }
        bool done = wait(tally, &bar[i], VARIANT ? 1 : 0);
        for (u32 j = threadIdx.x; j < 2048; j += 128) check(((volatile u32*)slot)[j] == first + j);
        if (VARIANT) done = wait(tally, &bar[i], 0);
        if (__syncthreads_or(!done)) break;
    }
}

ENTRY(128) mbarrier_bytes(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 slot[4096];
    __shared__ alignas(8) u64 bar[16];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 16; i++) init(&bar[i], 1);
        publish_inits();
    }
    for (u32 i = 0; i < 16; i++) {
        for (u32 j = threadIdx.x; j < 4096; j += 128) slot[j] = ~0u;
        proxy_fence();
        __syncthreads();
        const u32 first = (blockIdx.x * 16 + i) * 4096;
        if (threadIdx.x == 0) {
            expect(&bar[i], VARIANT ? 8192 : 16384);
            load(slot, data + first, 8192, &bar[i]);
            load(slot + 2048, data + first + 2048, 8192, &bar[i]);
        }
        bool done = wait(tally, &bar[i], 0);
        for (u32 j = threadIdx.x; j < 4096; j += 128) check(((volatile u32*)slot)[j] == first + j);
        __syncthreads();
        if (VARIANT && done) {  // the rest of the bytes counted into the next phase: complete it, and all has landed
            if (threadIdx.x == 0) expect(&bar[i], 8192);
            done = wait(tally, &bar[i], 1);
        }
        if (__syncthreads_or(!done)) break;
    }
}

ENTRY(32) mbarrier_init(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(8) u64 bar;
    cluster_sync();  // both CTAs run
    if (rank() == 0) {
        if (VARIANT == 2) spin(4000);
        if (threadIdx.x == 0) {
            init(&bar, 1);
            publish_inits();
        }
        __syncthreads();
    }
    if (VARIANT == 0) cluster_sync();
    if (threadIdx.x == 0) {
        if (rank() == 1) arrive_at(in_cta(IN_SHARED(&bar), 0));
        if (rank() == 0) check(wait(tally, &bar, 0));
    }
    cluster_sync();
}

// ---- bulk stores: reuse of the stage, reading back, exit

constexpr u32 WIDE = 8192;  // words

ENTRY(128) store_reuse(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    extern __shared__ __align__(128) u32 stage[];
    u32* mine = data + blockIdx.x * 8 * WIDE;
    for (u32 i = 0; i < 8; i++) {
        if (VARIANT == 0 && threadIdx.x == 0) stores_read();
        if (VARIANT == 2 && threadIdx.x == 1) stores_read();  // of another thread's stores: waits for nothing
        __syncthreads();
        for (u32 j = threadIdx.x; j < WIDE; j += 128) stage[j] = value(round * 8 + i, j);
        proxy_fence();
        __syncthreads();
        if (threadIdx.x == 0) store(mine + i * WIDE, stage, WIDE * 4);
    }
    if (threadIdx.x == 0) stores_done();
    __syncthreads();
    for (u32 i = 0; i < 8; i++) {
        for (u32 j = threadIdx.x; j < WIDE; j += 128) check(read_global(mine + i * WIDE + j) == value(round * 8 + i, j));
    }
}

ENTRY(128) store_read_back(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 stage[STAGE];
    u32* mine = data + blockIdx.x * STAGE;
    for (u32 i = 0; i < 8; i++) {
        const u32 tag = round * 8 + i;
        for (u32 j = threadIdx.x; j < STAGE; j += 128) stage[j] = value(tag, j);
        proxy_fence();
        __syncthreads();
        if (threadIdx.x == 0) {
            store(mine, stage, STAGE * 4);
            if (VARIANT) stores_read(); else stores_done();
        }
        __syncthreads();
        for (u32 j = threadIdx.x; j < STAGE; j += 128) check(read_global(mine + j) == value(tag, j));
        if (threadIdx.x == 0) stores_done();
        __syncthreads();
    }
}

ENTRY(128) store_exit(Tally* tally, u32* data, u32 round) {
    extern __shared__ __align__(128) u32 stage[];
    const u32 tag = round * gridDim.x + blockIdx.x;
    for (u32 j = threadIdx.x; j < WIDE; j += 128) stage[j] = value(tag, j);
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        store(data + blockIdx.x * WIDE, stage, WIDE * 4);
        if (VARIANT == 0) stores_read();
    }
}
ENTRY(128) store_exit_after(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    for (u32 j = threadIdx.x; j < WIDE; j += 128)
        check(data[blockIdx.x * WIDE + j] == value(round * gridDim.x + blockIdx.x, j));
}

// ---- wgmma: all elements of an operand are alike, so that its layout does not matter

constexpr u32 ONES = 0x3C003C00, TWOS = 0x40004000;  // pairs of float16
constexpr int REGS = 32, STEPS = 64;                 // m64n64k16; 64 of them keep the tensor core busy for 2000 cycles

DEVICE u64 descriptor(const void* p) {  // no swizzle; 8-row atoms 256 B apart, the halves of K 128 B apart
    return (u64)(IN_SHARED(p) >> 4) | 8ull << 16 | 16ull << 32;
}
DEVICE void mma(float (&d)[REGS], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
          "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate) : "memory");
}
DEVICE void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
DEVICE void pin(float (&d)[REGS]) {  // keeps the compiler from using d before the wait that precedes this
#pragma unroll
    for (int i = 0; i < REGS; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
DEVICE void check_all(Count& check, float (&d)[REGS], float expected) {
#pragma unroll
    for (int i = 0; i < REGS; i++) check(d[i] == expected);
}

ENTRY(128) wgmma_operands(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 a[512], b[512];
    float d[REGS];
    for (u32 i = 0; i < 8; i++) {
        for (u32 j = threadIdx.x; j < 512; j += 128) a[j] = b[j] = ONES;
        proxy_fence();
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < STEPS; k++) {
            mma_fence();
            mma(d, descriptor(a), descriptor(b), k);
        }
        mma_commit();
        if (VARIANT == 0) mma_wait();
        if (VARIANT == 0) __syncthreads();
        for (u32 j = threadIdx.x; j < 512; j += 128) b[j] = TWOS;
        proxy_fence();
        if (VARIANT) mma_wait();
        pin(d);
        check_all(check, d, 16.0f * STEPS);
        __syncthreads();
    }
}

ENTRY(128) wgmma_proxy_fence(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 a[512], b[512];
    float d[REGS];
    for (u32 j = threadIdx.x; j < 512; j += 128) a[j] = ONES, b[j] = TWOS;
    proxy_fence();
    __syncthreads();
    for (u32 i = 0; i < 64; i++) {
        for (u32 j = threadIdx.x; j < 512; j += 128) b[j] = i % 2 ? TWOS : ONES;
        if (VARIANT == 0) proxy_fence();
        __syncthreads();
        mma_fence();
        mma(d, descriptor(a), descriptor(b), 0);
        mma_commit();
        mma_wait();
        pin(d);
        check_all(check, d, i % 2 ? 32.0f : 16.0f);
        __syncthreads();
    }
}

ENTRY(128) wgmma_registers(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 a[512], b[512];
    float d[REGS], early[REGS];
    for (u32 j = threadIdx.x; j < 512; j += 128) a[j] = b[j] = ONES;
    proxy_fence();
    __syncthreads();
    for (u32 i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < REGS; j++) asm volatile("mov.f32 %0, %1;" : "=f"(d[j]) : "f"((float)i));
#pragma unroll 1
        for (int k = 0; k < STEPS; k++) {
            if (VARIANT != 2) mma_fence();
            mma(d, descriptor(a), descriptor(b), 1);
        }
        mma_commit();
        if (VARIANT != 1) mma_wait();
#pragma unroll
        for (int j = 0; j < REGS; j++) asm volatile("mov.f32 %0, %1;" : "=f"(early[j]) : "f"(d[j]));
        if (VARIANT == 1) mma_wait();
        check_all(check, early, 16.0f * STEPS + (float)i);
        __syncthreads();
    }
}

// ---- partial sums in global memory: four CTAs leave theirs and count themselves in; the last one reads all

constexpr u32 PART = 4096, SLICES = 4;  // words per slice

ENTRY(128) partial_sums(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ u32 before;
    const u32 slice = blockIdx.x % SLICES, group = blockIdx.x / SLICES;
    u32 *counters = data, *parts = data + 4096 + group * SLICES * PART;
    for (u32 j = threadIdx.x * 4; j < PART; j += 512) {
        const u32 v = value(round * SLICES + slice, j);
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(parts + slice * PART + j), "r"(v), "r"(v + 1), "r"(v + 2), "r"(v + 3) : "memory");
    }
    if (VARIANT == 0 || VARIANT == 1) __syncthreads();
    if (threadIdx.x == 0) {
        if (VARIANT == 0 || VARIANT == 2)
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + group) : "memory");
        else
            asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + group) : "memory");
    }
    __syncthreads();
    if (before != SLICES - 1) return;
    for (u32 j = threadIdx.x; j < SLICES * PART; j += 128)
        check(read_global(parts + j) == value(round * SLICES + j / PART, j % PART));
    if (threadIdx.x == 0) counters[group] = 0;
}

// ---- exit of a CTA that a peer still targets; whoever comes next on the SM guards the same shared memory

ENTRY(128) peer_exit(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    __shared__ alignas(128) u32 slot[2048];
    __shared__ alignas(128) u32 guard[8192];
    __shared__ alignas(8) u64 bar;
    for (u32 j = threadIdx.x; j < 8192; j += 128) guard[j] = value(blockIdx.x, j);
    for (u32 j = threadIdx.x; j < 2048; j += 128) slot[j] = value(blockIdx.x, j);
    if (threadIdx.x == 0) {
        init(&bar, 1);
        publish_inits();
        if (VARIANT != 1) expect(&bar, 8192);
    }
    proxy_fence();
    cluster_sync();
    spin(2000);
    if (VARIANT == 1) check(!complete(&bar, 0));
    for (u32 j = threadIdx.x; j < 8192; j += 128) check(((volatile u32*)guard)[j] == value(blockIdx.x, j));
    for (u32 j = threadIdx.x; j < 2048; j += 128) check(((volatile u32*)slot)[j] == value(blockIdx.x, j));
    cluster_sync();
    if (rank() == 1) {
        if (VARIANT) spin(30000);
        if (threadIdx.x == 0) {
            if (VARIANT == 1)
                arrive_at(in_cta(IN_SHARED(&bar), 0));
            else
                load_to_both(slot, data, 8192, &bar);
        }
        if (VARIANT != 1) check(wait(tally, &bar, 0));
    } else if (VARIANT == 0) {
        check(wait(tally, &bar, 0));
        for (u32 j = threadIdx.x; j < 2048; j += 128) check(((volatile u32*)slot)[j] == j);
    }
    if (VARIANT == 0) cluster_sync();
}

// ---- programmatic dependent launch: the reader may start while the writer runs

ENTRY(128) previous_writer(Tally* tally, u32* data, u32 round) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    spin(40000);
    for (u32 j = threadIdx.x; j < STAGE; j += 128) data[blockIdx.x * STAGE + j] = value(round, j);
}
ENTRY(128) dependent_reader(Tally* tally, u32* data, u32 round) {
    Count check(tally);
    if (VARIANT == 0 || (VARIANT == 2 && threadIdx.x == 0)) asm volatile("griddepcontrol.wait;" ::: "memory");
    for (u32 j = threadIdx.x; j < STAGE; j += 128) check(read_global(data + blockIdx.x * STAGE + j) == value(round, j));
}
