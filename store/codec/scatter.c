/* One pass over bytes: copied to the buffers they belong in, and digested on the way.
 *
 * Every byte is loaded once, and what was loaded is both digested and stored. So the digest is that
 * of the copy even where somebody writes to the source meanwhile, and memory, whose speed bounds
 * large copies, is read once rather than twice. On x86 the stores go past the caches: what is
 * written is larger than they are, and lines that are overwritten whole need not be read first.
 *
 * The digest is XXH3-64 with a seed, for inputs of more than 240 bytes, by its public specification:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest is written for little-endian machines"
#endif
#if defined(__x86_64__) && !defined(TANDEM_PORTABLE)
#define HAS_AVX2 1
#include <immintrin.h>
#endif

enum { STRIPE = 64, SECRET = 192, BLOCK = 16, SHORT = 240, PAGE = 4096 };

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define AVALANCHE 0x165667919E3779F9u

/* The specification's secret, as 64-bit words. */
static const uint64_t DEFAULT_SECRET[SECRET / 8] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu,
};

typedef struct {
    uint64_t lanes[8];
    uint64_t secret[SECRET / 8];
    unsigned place; /* stripes of the block that are taken */
} Digest;

/* Takes `count` stripes from `in`, stores them at `out` and goes on in the digest. */
typedef void Take(Digest *digest, const uint8_t *in, uint8_t *out, size_t count);

static uint64_t word(const void *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static const uint8_t *secret_at(const Digest *digest, size_t offset)
{
    return (const uint8_t *)digest->secret + offset;
}

static void mix(uint64_t lanes[8], const uint64_t data[8], const uint8_t *secret)
{
    for (int i = 0; i < 8; i++) {
        uint64_t key = data[i] ^ word(secret + 8 * i);
        lanes[i ^ 1] += data[i];
        lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

static void take_portable(Digest *digest, const uint8_t *in, uint8_t *out, size_t count)
{
    uint64_t lanes[8], data[8];
    memcpy(lanes, digest->lanes, sizeof lanes);
    for (; count; count--, in += STRIPE, out += STRIPE) {
        memcpy(data, in, STRIPE);
        memcpy(out, data, STRIPE);
        mix(lanes, data, secret_at(digest, 8 * digest->place));
        if (++digest->place == BLOCK) {
            digest->place = 0;
            for (size_t i = 0; i < 8; i++) {
                lanes[i] ^= lanes[i] >> 47;
                lanes[i] ^= word(secret_at(digest, SECRET - STRIPE + 8 * i));
                lanes[i] *= PRIME32_1;
            }
        }
    }
    memcpy(digest->lanes, lanes, sizeof lanes);
}

#ifdef HAS_AVX2
#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m256i mixed(__m256i lanes, __m256i data, const uint8_t *secret)
{
    __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

AVX2 static inline __m256i scrambled(__m256i lanes, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static void take_avx2(Digest *digest, const uint8_t *in, uint8_t *out, size_t count)
{
    __m256i left = _mm256_loadu_si256((const __m256i *)digest->lanes);
    __m256i right = _mm256_loadu_si256((const __m256i *)(digest->lanes + 4));
    const int aligned = ((uintptr_t)out & 31) == 0;
    while (count) {
        size_t run = BLOCK - digest->place;
        if (run > count)
            run = count;
        const uint8_t *secret = secret_at(digest, 8 * digest->place);
        for (size_t i = 0; i < run; i++, in += STRIPE, out += STRIPE, secret += 8) {
            /* Where the next page lies takes long to find, and would be asked for too late. */
            if (((uintptr_t)out & (PAGE - STRIPE)) == 0)
                __builtin_prefetch(out + PAGE);
            __m256i low = _mm256_loadu_si256((const __m256i *)in);
            __m256i high = _mm256_loadu_si256((const __m256i *)(in + 32));
            left = mixed(left, low, secret);
            right = mixed(right, high, secret + 32);
            if (aligned) {
                _mm256_stream_si256((__m256i *)out, low);
                _mm256_stream_si256((__m256i *)(out + 32), high);
            } else {
                _mm256_storeu_si256((__m256i *)out, low);
                _mm256_storeu_si256((__m256i *)(out + 32), high);
            }
        }
        count -= run;
        digest->place += (unsigned)run;
        if (digest->place == BLOCK) {
            digest->place = 0;
            left = scrambled(left, secret_at(digest, SECRET - STRIPE));
            right = scrambled(right, secret_at(digest, SECRET - STRIPE + 32));
        }
    }
    _mm256_storeu_si256((__m256i *)digest->lanes, left);
    _mm256_storeu_si256((__m256i *)(digest->lanes + 4), right);
    _mm_sfence(); /* streamed stores are seen by other threads like any others after this */
}
#endif

static Take *chosen(void)
{
#ifdef HAS_AVX2
    if (__builtin_cpu_supports("avx2"))
        return take_avx2;
#endif
    return take_portable;
}

static void begin(Digest *digest, uint64_t seed)
{
    const uint64_t lanes[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(digest->lanes, lanes, sizeof lanes);
    for (int i = 0; i < SECRET / 8; i += 2) {
        digest->secret[i] = DEFAULT_SECRET[i] + seed;
        digest->secret[i + 1] = DEFAULT_SECRET[i + 1] - seed;
    }
    digest->place = 0;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The digest of `nbytes` bytes, of which `last` are the final 64. */
static uint64_t ended(Digest *digest, const uint8_t last[STRIPE], uint64_t nbytes)
{
    uint64_t data[8];
    memcpy(data, last, STRIPE);
    mix(digest->lanes, data, secret_at(digest, SECRET - STRIPE - 7));
    uint64_t result = nbytes * PRIME64_1;
    for (size_t i = 0; i < 4; i++)
        result += folded(digest->lanes[2 * i] ^ word(secret_at(digest, 11 + 16 * i)),
                         digest->lanes[2 * i + 1] ^ word(secret_at(digest, 19 + 16 * i)));
    result ^= result >> 37;
    result *= AVALANCHE;
    return result ^ (result >> 32);
}

/* Where the next byte goes: buffers that follow one another. */
typedef struct {
    const Py_buffer *next;
    uint8_t *at;
    size_t room;
} Place;

static void open_next(Place *place)
{
    while (!place->room) {
        place->at = place->next->buf;
        place->room = (size_t)place->next->len;
        place->next++;
    }
}

static void put(Place *place, const uint8_t *from, size_t count)
{
    while (count) {
        open_next(place);
        size_t some = count < place->room ? count : place->room;
        memcpy(place->at, from, some);
        place->at += some;
        place->room -= some;
        from += some;
        count -= some;
    }
}

/* Copies `nbytes` (more than 240) bytes into the buffers, which have room for exactly as many. */
static uint64_t scatter(const uint8_t *from, size_t nbytes, const Py_buffer *into, uint64_t seed)
{
    Take *take = chosen();
    Digest digest;
    Place place = {into, NULL, 0};
    uint8_t last[2 * STRIPE] = {0}; /* the last whole stripe but one, and the rest */
    size_t stripes = (nbytes - 1) / STRIPE;
    begin(&digest, seed);
    while (stripes) {
        open_next(&place);
        size_t run = place.room / STRIPE;
        if (run) {
            if (run > stripes)
                run = stripes;
            take(&digest, from, place.at, run);
            place.at += STRIPE * run;
            place.room -= STRIPE * run;
            if (run == stripes)
                memcpy(last, place.at - STRIPE, STRIPE);
        } else {
            run = 1;
            take(&digest, from, last, run);
            put(&place, last, STRIPE);
        }
        from += STRIPE * run;
        stripes -= run;
    }
    size_t rest = nbytes - STRIPE * ((nbytes - 1) / STRIPE);
    memcpy(last + STRIPE, from, rest);
    put(&place, last + STRIPE, rest);
    return ended(&digest, last + rest, nbytes);
}

/* A copy to make: `buffers` are the source and then the places of its bytes. */
typedef struct {
    Py_buffer *buffers;
    Py_ssize_t count;
    unsigned long long seed;
    uint64_t digest;
} Job;

static void close_job(Job *job)
{
    for (Py_ssize_t i = 0; i < job->count; i++)
        PyBuffer_Release(job->buffers + i);
    PyMem_Free(job->buffers);
}

/* Fills a job, to be closed in any case, from (source, into, seed); -1 with an exception. */
static int open_job(Job *job, PyObject *told)
{
    PyObject *source, *into;
    if (!PyTuple_Check(told)) {
        PyErr_SetString(PyExc_TypeError, "a copy is a tuple of source, into and seed");
        return -1;
    }
    if (!PyArg_ParseTuple(told, "OOK", &source, &into, &job->seed))
        return -1;
    Py_ssize_t wanted = PySequence_Size(into);
    if (wanted < 0)
        return -1;
    job->buffers = PyMem_Calloc((size_t)wanted + 1, sizeof *job->buffers);
    if (!job->buffers) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyObject_GetBuffer(source, job->buffers, PyBUF_SIMPLE) < 0)
        return -1;
    size_t nbytes = 0;
    for (job->count = 1; job->count <= wanted; job->count++) {
        PyObject *item = PySequence_GetItem(into, job->count - 1);
        Py_buffer *buffer = job->buffers + job->count;
        int failed = !item || PyObject_GetBuffer(item, buffer, PyBUF_WRITABLE) < 0;
        Py_XDECREF(item); /* the buffer holds it */
        if (failed)
            return -1;
        nbytes += (size_t)buffer->len;
    }
    if (nbytes != (size_t)job->buffers->len)
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill buffers of %zu", job->buffers->len,
                     nbytes);
    else if (nbytes <= SHORT)
        PyErr_Format(PyExc_ValueError, "%zu bytes are too few: at least %d", nbytes, SHORT + 1);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *digests_of(const Job *jobs, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *digest = PyLong_FromUnsignedLongLong(jobs[i].digest);
        if (!digest)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, i, digest);
    }
    return list;
}

static PyObject *py_scatter(PyObject *Py_UNUSED(module), PyObject *copies)
{
    Py_ssize_t wanted = PySequence_Size(copies), count = 0;
    if (wanted < 0)
        return NULL;
    Job *jobs = PyMem_Calloc((size_t)wanted + 1, sizeof *jobs);
    if (!jobs)
        return PyErr_NoMemory();
    int failed = 0;
    while (count < wanted && !failed) {
        PyObject *told = PySequence_GetItem(copies, count);
        failed = !told || open_job(jobs + count++, told) < 0;
        Py_XDECREF(told);
    }
    PyObject *digests = NULL;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            jobs[i].digest = scatter(jobs[i].buffers->buf, (size_t)jobs[i].buffers->len,
                                     jobs[i].buffers + 1, jobs[i].seed);
        Py_END_ALLOW_THREADS
        digests = digests_of(jobs, count);
    }
    while (count)
        close_job(jobs + --count);
    PyMem_Free(jobs);
    return digests;
}

/* Whether all pages of mapped memory are in memory, so that reading them waits for no disk. */
static int is_resident(const uint8_t *at, size_t nbytes)
{
    enum { MOST = 512 };
    unsigned char told[MOST];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t skip = (uintptr_t)at % page;
    at -= skip;
    size_t pages = (nbytes + skip + page - 1) / page;
    while (pages) {
        size_t some = pages < MOST ? pages : MOST;
        if (mincore((void *)(uintptr_t)at, some * page, (void *)told) != 0)
            return 0;
        for (size_t i = 0; i < some; i++)
            if (!(told[i] & 1))
                return 0;
        at += some * page;
        pages -= some;
    }
    return 1;
}

static PyObject *py_is_resident(PyObject *Py_UNUSED(module), PyObject *memory)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    /* The interpreter's lock is kept: waiting for it again takes longer than asking does. */
    int resident = is_resident(view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyBool_FromLong(resident);
}

static PyMethodDef METHODS[] = {
    {"scatter", py_scatter, METH_O,
     "scatter(copies, /): for each (source, into, seed) copy source into the writable buffers of\n"
     "the sequence into, one after the other. Returns the XXH3-64 of each copy. Runs without the\n"
     "interpreter's lock. Raises ValueError, before anything is copied, unless the buffers of each\n"
     "have room for exactly its bytes, more than 240."},
    {"is_resident", py_is_resident, METH_O,
     "is_resident(memory, /): whether all pages of mapped memory are in memory."},
    {NULL, NULL, 0, NULL},
};

static int filled(PyObject *module)
{
    const char *name = chosen() == take_portable ? "portable" : "AVX2";
    return PyModule_AddStringConstant(module, "VARIANT", name);
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, filled}, {0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_scatter",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__scatter(void);

PyMODINIT_FUNC PyInit__scatter(void)
{
    return PyModuleDef_Init(&MODULE);
}
