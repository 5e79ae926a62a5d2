/* main.c -- the explorer's command line. One scenario a call; what it found is one line of JSON. */
#include "engine.h"

extern struct ex_site __start_ex_sites[], __stop_ex_sites[];

const char *const ex_kind_name[EX_KINDS] = {
    "load", "store", "cas", "change", "write_back", "invalidate", "write_fence", "read_fence", "full_fence", "host_fence", "lines_end",
    "lines_note", "step",
};

static int usage(void)
{
    puts("explorer list                    the scenarios\n"
         "explorer sites                   the call sites that are compiled in, FILE:LINE:KIND\n"
         "explorer run NAME [option ...]   explore one scenario; default: exhaustively where it says so\n"
         "  pb=N ev=N xb=N    preemptions, cache events, crashes (99: as many as there can be; pb and ev)\n"
         "  prune, noprune    skip states that were seen before, or do not\n"
         "  ladder            fewer preemptions first\n"
         "  lazy              write-backs and invalidates are late whenever they may be\n"

         "  random=N seed=N   random runs instead\n"
         "  seconds=N runs=N  stop early\n"
         "  mutate=SITE       this site does nothing; SITE:weak makes a full fence a write fence\n"
         "  replay=TRAIL known=LINES   one run again, told step by step, as a failure prints them\n"
         "  passes            also print how often each site was passed\n"
         "  quiet             do not tell a failure step by step");
    return 2;
}

static void site_name(const struct ex_site *site, char text[128])
{
    snprintf(text, 128, "%s:%d:%s", site->file, site->line, ex_kind_name[site->kind]);
}

/* A line of a header, or an inlined function, is several sites of one name. */
static int is_repeated(const struct ex_site *site)
{
    for (const struct ex_site *other = __start_ex_sites; other < site; other++)
        if (other->line == site->line && other->kind == site->kind && !strcmp(other->file, site->file))
            return 1;
    return 0;
}

static void print_sites(void)
{
    char name[128];

    for (const struct ex_site *site = __start_ex_sites; site < __stop_ex_sites; site++) {
        site_name(site, name);
        if (site->kind != EX_STEP && !is_repeated(site))
            puts(name);
    }
}

static void print_passes(void)
{
    char name[128];

    for (const struct ex_site *site = __start_ex_sites; site < __stop_ex_sites; site++) {
        site_name(site, name);
        if (site->kind != EX_STEP && site->passes)
            printf("passed %s %llu\n", name, (unsigned long long)site->passes);
    }
}

static int mutate(const char *wanted)
{
    char name[128];
    int found = 0;

    for (struct ex_site *site = __start_ex_sites; site < __stop_ex_sites; site++) {
        site_name(site, name);
        size_t length = strlen(name);
        if (strncmp(wanted, name, length) != 0)
            continue;
        if (wanted[length] == '\0')
            site->mutation = EX_REMOVED;
        else if (!strcmp(wanted + length, ":weak") && site->kind == EX_FULL_FENCE)
            site->mutation = EX_WEAK;
        else
            continue;
        found = 1;
    }
    return found;
}

static const struct ex_scenario *find(const char *name)
{
    for (int i = 0; ex_scenarios[i]; i++)
        if (!strcmp(ex_scenarios[i]->name, name))
            return ex_scenarios[i];
    return NULL;
}

struct options {
    struct request request;
    const char *mutation;
    int passes, quiet;
};

/* 1 if the word was an option. */
static int read_option(const char *word, struct options *options)
{
    struct request *request = &options->request;
    const char *value = strchr(word, '=');
    size_t length = value ? (size_t)(value++ - word) : strlen(word);

#define IS(name) (length == sizeof name - 1 && !strncmp(word, name, length))
    if (!value) {
        if (IS("prune"))
            return request->prune = 1;
        if (IS("lazy"))
            return request->lazy = 1;
        if (IS("ladder"))
            return request->ladder = 1;
        if (IS("passes"))
            return options->passes = 1;
        if (IS("noprune"))
            return request->prune = 0, 1;
        return IS("quiet") ? options->quiet = 1 : 0;
    }
    if (IS("pb"))
        request->limit.preemptions = atoi(value);
    else if (IS("ev"))
        request->limit.events = atoi(value);
    else if (IS("xb"))
        request->limit.crashes = atoi(value);
    else if (IS("seconds"))
        request->seconds = atof(value);
    else if (IS("runs"))
        request->runs = strtoull(value, NULL, 10);
    else if (IS("random"))
        request->random = strtoull(value, NULL, 10);
    else if (IS("seed"))
        request->seed = strtoull(value, NULL, 10);
    else if (IS("mutate"))
        options->mutation = value;
    else if (IS("replay"))
        request->replay = value;
    else if (IS("known"))
        request->known = value;
    else
        return 0;
#undef IS
    return 1;
}

static void print_result(const struct ex_scenario *scenario, const struct options *options, const struct result *result)
{
    const struct budgets *limit = &options->request.limit;

    printf("{\"scenario\": \"%s\", \"failed\": %s, \"complete\": %s, \"pb\": %d, \"ev\": %d, \"xb\": %d, \"runs\": %llu, "
           "\"pruned\": %llu, \"states\": %llu, \"steps\": %llu, \"seconds\": %.2f, \"racy\": %u, \"restarts\": %d",
           scenario->name, result->failed ? "true" : "false", result->complete ? "true" : "false", result->preemptions,
           limit->events, limit->crashes, (unsigned long long)result->runs, (unsigned long long)result->pruned,
           (unsigned long long)result->states, (unsigned long long)result->steps, result->seconds, result->racy,
           result->restarts);
    if (result->failed) {
        printf(", \"message\": \"");
        for (const char *c = ex.message; *c; c++)
            if (*c != '"' && *c != '\\')
                putchar(*c);
        printf("\", \"replay\": \"");
        ex_trail_print(stdout);
        printf("\", \"known\": \"");
        ex_known_print(stdout);
        printf("\"");
    }
    puts("}");
    fflush(stdout);
}

/* The failed run again. Text is taken from memory files, because the search itself overwrites what it has learned. */
static void tell(const struct ex_scenario *scenario, struct request request, int preemptions)
{
    char *trail = NULL, *known = NULL;
    size_t length;
    FILE *out = open_memstream(&trail, &length);

    ex_trail_print(out);
    fclose(out);
    out = open_memstream(&known, &length);
    ex_known_print(out);
    fclose(out);
    request.replay = trail;
    request.known = known;
    request.limit.preemptions = preemptions; /* of the rung on which it failed: choices depend on what is left of them */
    struct result result = ex_search(scenario, &request);
    puts(result.failed ? ex.message : "the run did not fail again");
    free(trail);
    free(known);
}

static int run(int count, char **words)
{
    const struct ex_scenario *scenario = find(words[0]);
    struct options options = {.request = {.seed = 1}};

    if (!scenario) {
        fprintf(stderr, "no scenario '%s': explorer list shows them\n", words[0]);
        return 2;
    }
    options.request.limit = (struct budgets){scenario->seconds > 0 ? UNBOUNDED : scenario->preemptions,
                                             scenario->seconds > 0 ? UNBOUNDED : scenario->events, scenario->crashes};
    options.request.prune = scenario->seconds > 0;
    for (int i = 1; i < count; i++)
        if (!read_option(words[i], &options))
            return usage();
    if (options.mutation && !mutate(options.mutation)) {
        fprintf(stderr, "no site '%s': explorer sites shows them\n", options.mutation);
        return 2;
    }
    if (options.request.replay && !options.request.known)
        options.request.known = "";
    struct result result = ex_search(scenario, &options.request);
    print_result(scenario, &options, &result);
    if (options.passes)
        print_passes();
    if (result.failed && !options.quiet && !options.request.replay)
        tell(scenario, options.request, result.preemptions);
    return result.failed ? 1 : 0;
}

int main(int count, char **words)
{
    uint32_t id = 0;

    for (struct ex_site *site = __start_ex_sites; site < __stop_ex_sites; site++)
        site->id = ++id;
    if (count >= 3 && !strcmp(words[1], "run"))
        return run(count - 2, words + 2);
    if (count == 2 && !strcmp(words[1], "sites"))
        print_sites();
    else if (count == 2 && !strcmp(words[1], "list"))
        for (int i = 0; ex_scenarios[i]; i++)
            printf("%-28s %s\n", ex_scenarios[i]->name, ex_scenarios[i]->what);
    else
        return usage();
    return 0;
}
