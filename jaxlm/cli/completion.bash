# Completion of jaxlm for bash, made by `jaxlm completion bash`.

_jaxlm_words='
@WORDS@
'

_jaxlm() {
    local line=${COMP_LINE:0:COMP_POINT} cur seen word verb= context= where name values
    local IFS=$' \t\n' ours=0 found= cut
    cur=${line##*[[:space:]]}
    read -ra seen <<<"${line%"$cur"}"
    for word in "${seen[@]}"; do
        if ((!ours)); then
            [[ ${word##*/} == "${1##*/}" ]] && ours=1
        elif [[ $word != -* && -z $verb ]]; then
            verb=$word context=$word
        elif [[ $word != -* && $context == "$verb" && $_jaxlm_words == *$'\n'"$verb $word|"* ]]; then
            context="$verb $word"
        fi
    done
    local flag=${cur%%=*} settings='@' prefix="${cur%%=*}=" typed=${cur#*=} is_value=
    [[ $cur == -*=* ]] && is_value=1
    if [[ $cur != -* && $word == --*[!=] && $word != *=* ]]; then
        # `--flag VALUE`, unless the flag is a switch
        [[ $_jaxlm_words == *"|$word|"[^\|]* ]] && is_value=1 flag=$word prefix= typed=$cur
    fi
    [[ $_jaxlm_words == *$'\n'"@$context|"* ]] && settings="@$context"
    COMPREPLY=()
    while IFS='|' read -r where name values _; do
        [[ $where == "$context" || $where == "$verb" ||
            ($verb && $where == "$settings" && $cur$flag == *--config.*) ]] || continue
        if [[ $is_value ]]; then
            [[ $flag == "$name" ]] || continue
            for word in $(IFS=' '; set -f; printf '%s\n' $values); do
                case $word in
                    .) _jaxlm_files "$prefix" "$typed" ;;
                    =) ;;
                    *) [[ $word == "$typed"* ]] && COMPREPLY+=("$prefix$word ") ;;
                esac
            done
        elif [[ $where == "$context" && -z $name && $cur != -* && $values == . ]]; then
            _jaxlm_files '' "$cur"
        elif [[ $name == "$cur"* && -n $name && ($name != -* || $cur == -*) ]]; then
            [[ $where != "$context" && $name != -* ]] && continue
            [[ $values ]] && word="$name=" || word="$name "
            cut=${name#"$cur"}
            if [[ $cur == --config.* && $cut == *.* ]]; then
                word="$cur${cut%%.*}."
            fi
            [[ $found == *" $word "* ]] || COMPREPLY+=("$word")
            found+=" $word "
        fi
    done <<<"$_jaxlm_words"
    if [[ -n $verb && $cur == -* && --config. == "$cur"* && $cur != --config. ]]; then
        [[ $_jaxlm_words == *$'\n'"$context|--config|"* || $_jaxlm_words == *$'\n'"$verb|--config|"* ]] &&
            COMPREPLY+=('--config.')
    fi
    # readline replaces the text after the last = or : only.
    local breaks=${cur%"${cur##*[=:]}"}
    if [[ $breaks && $COMP_WORDBREAKS == *"${breaks: -1}"* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"$breaks"}")
    fi
}

# Adds the files whose names begin with $2, each after $1.
_jaxlm_files() {
    local file typed
    while IFS= read -r file; do
        [[ $file ]] || continue
        [[ -d $file ]] && typed=/ || typed=' '
        printf -v file %q "$file"
        COMPREPLY+=("$1$file$typed")
    done < <(compgen -f -- "$2")
}

complete -o nospace -F _jaxlm jaxlm
