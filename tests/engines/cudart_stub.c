/* cudart_stub.c -- a CUDA runtime that only writes down its arguments, to check what the bindings pass. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static char told[4096];
static int answer;

#define TELL(...) (snprintf(told + strlen(told), sizeof told - strlen(told), __VA_ARGS__), answer)

void stub_answer(int code) { answer = code; }
const char *stub_told(void) { return told; }
void stub_forget(void) { told[0] = 0; }

const char *cudaGetErrorName(int code) { return code == 2 ? "cudaErrorMemoryAllocation" : "cudaErrorOther"; }
int cudaSetDevice(int index) { return TELL("setDevice %d;", index); }
int cudaHostRegister(void *at, size_t size, unsigned flags) { return TELL("register %p %zu %u;", at, size, flags); }
int cudaHostUnregister(void *at) { return TELL("unregister %p;", at); }
int cudaHostGetDevicePointer(void **out, void *at, unsigned flags)
{
    *out = (char *)at + 4096;
    return TELL("pointer %p %u;", at, flags);
}
int cudaStreamCreateWithFlags(void **out, unsigned flags)
{
    *out = (void *)0x7f0011223344;
    return TELL("stream %u;", flags);
}
int cudaStreamDestroy(void *stream) { return TELL("endStream %p;", stream); }
int cudaStreamSynchronize(void *stream) { return TELL("drain %p;", stream); }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return TELL("streamWait %p %p %u;", stream, event, flags); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream)
{
    return TELL("copy %p %p %zu %d %p;", to, from, size, kind, stream);
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind,
                      void *stream)
{
    return TELL("rows %p %zu %p %zu %zu %zu %d %p;", to, to_pitch, from, from_pitch, width, height, kind, stream);
}
int cudaEventCreateWithFlags(void **out, unsigned flags)
{
    *out = (void *)0x7f0055667788;
    return TELL("event %u;", flags);
}
int cudaEventRecord(void *event, void *stream) { return TELL("record %p %p;", event, stream); }
int cudaEventQuery(void *event) { return TELL("query %p;", event); }
int cudaEventSynchronize(void *event) { return TELL("wait %p;", event); }
int cudaEventDestroy(void *event) { return TELL("endEvent %p;", event); }
