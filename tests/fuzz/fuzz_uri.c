/* fuzz_uri.c -- a pool URI is what a user types: refused with a reason, or taken apart within bounds. */
#include "coherence/coherence.h"
#include "coherence/uri.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct kvp_uri uri;
    char *text = malloc(bytes + 1); /* of this very length, so that one byte too far is seen */

    memcpy(text, data, bytes);
    text[bytes] = '\0';
    int status = kvp_uri_parse(text, &uri);
    if (status != KVP_OK && (status != KVP_E_INVALID || !*kvp_error_detail()))
        abort();
    if (status == KVP_OK && (strlen(uri.path) >= sizeof uri.path || strlen(uri.text) >= sizeof uri.text))
        abort();
    free(text);
    return 0;
}
