#compdef jaxlm
# Completion of jaxlm for zsh, made by `jaxlm completion zsh`.

_jaxlm() {
    local table='
@WORDS@
'
    local cur=${(Q)words[CURRENT]} verb= context= settings='@' word row flag typed prefix= is_value=
    local -a rows cells found shown
    rows=(${(f)table})
    for word in ${words[2,CURRENT-1]}; do
        if [[ $word != -* && -z $verb ]]; then
            verb=$word context=$word
        elif [[ $word != -* && $context == $verb && $table == *$'\n'"$verb $word|"* ]]; then
            context="$verb $word"
        fi
    done
    [[ $table == *$'\n'"@$context|"* ]] && settings="@$context"
    word=${words[CURRENT-1]}
    if [[ $cur == -*=* ]]; then
        is_value=1 flag=${cur%%=*} typed=${cur#*=} prefix="${cur%%=*}="
    elif [[ $cur != -* && $word == --* && $word != *=* && $table == *"|$word|"[^\|]* ]]; then
        is_value=1 flag=$word typed=$cur
    fi
    for row in $rows; do
        cells=("${(@s:|:)row}")
        [[ $cells[1] == $context || $cells[1] == $verb ||
            ( -n $verb && $cells[1] == $settings && "$cur$flag" == *--config.* ) ]] || continue
        if [[ -n $is_value ]]; then
            [[ $cells[2] == $flag ]] || continue
            for word in ${=cells[3]}; do
                if [[ $word == . ]]; then
                    [[ -n $prefix ]] && compset -P '*='
                    _files
                    [[ -n $prefix ]] && PREFIX="$IPREFIX$PREFIX" IPREFIX=
                elif [[ $word != '=' && $word == "$typed"* ]]; then
                    found+=("$prefix$word") shown+=("$word")
                fi
            done
        elif [[ -z $cells[2] ]]; then
            [[ $cells[1] == $context && $cells[3] == . && $cur != -* ]] && _files
        elif [[ $cells[2] == $cur* && ( $cells[2] != -* || $cur == -* ) ]]; then
            [[ $cells[1] != $context && $cells[2] != -* ]] && continue
            word=${cells[2]#$cur}
            if [[ $cur == --config.* && $word == *.* ]]; then
                word="$cur${word%%.*}." cells[4]='settings'
            else
                word="$cells[2]${cells[3]:+=}"
            fi
            (( ${found[(Ie)$word]} )) && continue
            found+=("$word") shown+=("$word -- $cells[4]")
        fi
    done
    if [[ -z $is_value && -n $verb && $cur == -* && --config. == $cur* && $cur != --config. ]]; then
        [[ $table == *$'\n'"$context|--config|"* || $table == *$'\n'"$verb|--config|"* ]] &&
            found+=('--config.') shown+=('--config. -- settings')
    fi
    if (( $#found == 1 )) && [[ $found[1] != *[=.] ]]; then
        compadd -l -d shown -a found
    elif (( $#found )); then
        compadd -l -S '' -d shown -a found
    fi
}

if [[ $funcstack[1] == _jaxlm ]]; then
    _jaxlm "$@"
else
    compdef _jaxlm jaxlm
fi
